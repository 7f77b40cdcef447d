process CEILING {
    tag   "${meta.id}"
    label 'process_medium'
    label 'cpu'
    // see sample.nf
    array "${params.job_arrays}" == 'true' && !workflow.resume && (params.evaluation_shards as int) > 1 ?
        params.evaluation_shards as int : 0

    input:
    tuple val(meta), path(store), path(split), val(recipe),
        path(genes, stageAs: 'genes/*'), path(targets, stageAs: 'targets/*')

    output:
    tuple val(meta), path("${meta.id}"), emit: metrics
    path 'versions.yml',                 emit: versions

    script:
    def chosen = genes ? "--genes ${genes}" : ''
    def table = targets ? "--targets ${targets}" : ''
    def piece = meta.shard ? "--shard ${meta.shard}" : ''
    """
    cat > recipe.yaml <<'END'
    ${recipe}
    END
    perturbdiff ceiling ${store} \\
        --split ${split} --part ${meta.part} --out ${meta.id} --config recipe.yaml \\
        --dataset ${meta.dataset} --seed ${meta.seed} --threads ${task.cpus} ${piece} \\
        ${chosen} ${table}
    echo "${task.process.tokenize(':').last()}: \$(perturbdiff --version)" > versions.yml
    """

    stub:
    """
    mkdir ${meta.id}
    echo '{"stage": "stub", "files": {"metrics.parquet": {}, "aggregate.csv": {}}}' > ${meta.id}/manifest.json
    touch ${meta.id}/metrics.parquet ${meta.id}/aggregate.csv versions.yml
    """
}
