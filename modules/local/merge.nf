process MERGE {
    tag   "${meta.id}"
    label 'process_low'
    label 'cpu'

    input:
    tuple val(meta), path(parts)

    output:
    tuple val(meta), path("${meta.id}"), emit: metrics
    path 'versions.yml',                 emit: versions

    script:
    """
    perturbdiff merge ${parts} --out ${meta.id}
    echo "${task.process.tokenize(':').last()}: \$(perturbdiff --version)" > versions.yml
    """

    stub:
    """
    mkdir ${meta.id}
    touch ${meta.id}/metrics.parquet ${meta.id}/aggregate.csv versions.yml
    """
}
