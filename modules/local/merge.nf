process MERGE {
    tag   "${meta.id}"
    label 'process_low'
    label 'cpu'

    input:
    // folders of metrics, or predictions with the records that lie beside them
    tuple val(meta), path(parts), path(records)

    output:
    tuple val(meta), path("${meta.id}"), emit: whole
    path "${meta.id}.*.json",            emit: records, optional: true
    path 'versions.yml',                 emit: versions

    script:
    """
    perturbdiff merge ${parts} --out ${meta.id}
    echo "${task.process.tokenize(':').last()}: \$(perturbdiff --version)" > versions.yml
    """

    stub:
    def part     = [parts].flatten()[0]
    def manifest = [records].flatten().find { record -> "${record}".endsWith('.manifest.json') }
    """
    if [ -d ${part} ]; then
        cp -RL ${part} ${meta.id}
    else
        cp ${manifest} ${meta.id}.manifest.json
        touch ${meta.id} ${meta.id}.run.json
    fi
    touch versions.yml
    """
}
