process STATS {
    tag   "${meta.id}"
    label 'process_low'
    label 'cpu'

    input:
    // meta.published: the data set whose numbers in the paper are set beside these, or ''
    tuple val(meta), path(store), path(split), path(genes, stageAs: 'genes/*')

    output:
    tuple val(meta), path("${meta.id}.stats"), emit: tables
    path 'versions.yml',                       emit: versions

    script:
    def args  = task.ext.args ?: ''
    def parts = split ? "--split ${split}" : ''
    def paper = meta.published ? "--published ${meta.published}" : ''
    def list  = genes ? "--genes ${genes}" : ''
    """
    perturbdiff stats ${store} --out ${meta.id}.stats ${parts} ${paper} ${list} --jobs "\${OMP_NUM_THREADS:-1}" ${args}
    echo "${task.process.tokenize(':').last()}: \$(perturbdiff --version)" > versions.yml
    """

    stub:
    """
    mkdir ${meta.id}.stats
    echo '{"stage": "stub", "files": {"summary.json": {}}}' > ${meta.id}.stats/manifest.json
    touch ${meta.id}.stats/summary.json versions.yml
    """
}
