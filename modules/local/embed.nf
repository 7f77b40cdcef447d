include { told } from '../plan/characters'

process EMBED {
    tag   "${meta.id}"
    label 'process_sample'
    label 'gpu'

    input:
    // meta.options: name → value; meta.named: the options that `given` are the files of
    tuple val(meta), path(names, stageAs: 'names/*'), path(given, stageAs: 'given?/*')

    output:
    tuple val(meta), path("${meta.id}.parquet"), emit: table
    path "${meta.id}.parquet.*.json",            emit: records
    path 'versions.yml',                         emit: versions

    script:
    def args = task.ext.args ?: ''
    """
    perturbdiff embed ${names} --out ${meta.id}.parquet ${told(meta, given)} ${args}
    echo "${task.process.tokenize(':').last()}: \$(perturbdiff --version)" > versions.yml
    """

    stub:
    """
    echo '{"stage": "stub"}' > ${meta.id}.parquet.manifest.json
    touch ${meta.id}.parquet versions.yml
    """
}
