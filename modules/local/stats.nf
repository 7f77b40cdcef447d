process STATS {
    tag   "${meta.id}"
    label 'process_low'
    label 'cpu'

    input:
    tuple val(meta), path(store), path(split)

    output:
    tuple val(meta), path("${meta.id}.stats"), emit: tables
    path 'versions.yml',                       emit: versions

    script:
    def args  = task.ext.args ?: ''
    def parts = split ? "--split ${split}" : ''
    """
    perturbdiff stats ${store} --out ${meta.id}.stats ${parts} --jobs "\${OMP_NUM_THREADS:-1}" ${args}
    echo "${task.process.tokenize(':').last()}: \$(perturbdiff --version)" > versions.yml
    """

    stub:
    """
    mkdir ${meta.id}.stats
    echo '{"stage": "stub", "files": {"summary.json": {}}}' > ${meta.id}.stats/manifest.json
    touch ${meta.id}.stats/summary.json versions.yml
    """
}
