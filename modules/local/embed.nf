include { told } from '../plan/characters'

process EMBED {
    tag   "${meta.id}"
    label 'process_sample'
    label 'gpu'

    input:
    // meta.options: name → value
    tuple val(meta), path(names, stageAs: 'names/*')

    output:
    tuple val(meta), path("${meta.id}.parquet"), emit: table
    path "${meta.id}.parquet.*.json",            emit: records
    path 'versions.yml',                         emit: versions

    script:
    def args = task.ext.args ?: ''
    """
    perturbdiff embed ${names} --out ${meta.id}.parquet ${told(meta, [])} ${args}
    echo "${task.process.tokenize(':').last()}: \$(perturbdiff --version)" > versions.yml
    """

    stub:
    """
    echo '{"stage": "stub"}' > ${meta.id}.parquet.manifest.json
    touch ${meta.id}.parquet versions.yml
    """
}
