process EVALUATE {
    tag   "${meta.id}"
    label 'process_medium'
    label 'cpu'
    // equal predictions are known by their content: another number of sampling shards does not score again
    cache 'deep'
    // see sample.nf
    array "${params.job_arrays}" == 'true' && !workflow.resume && (params.evaluation_shards as int) > 1 ?
        params.evaluation_shards as int : 0

    input:
    // known: a calibration or the ends of the scale (meta.byCounts), or []
    tuple val(meta), path(predictions), path(store), val(recipe), path(known),
        path(genes, stageAs: 'genes/*'), path(targets, stageAs: 'targets/*')

    output:
    tuple val(meta), path("${meta.id}"), emit: metrics
    path 'versions.yml',                 emit: versions

    script:
    def chosen = genes ? "--genes ${genes}" : ''
    def table = targets ? "--targets ${targets}" : ''
    def piece = meta.shard ? "--shard ${meta.shard}" : ''
    def once = !known ? '' : meta.byCounts ? "--ends ${known}" : "--calibration ${known}"
    """
    cat > recipe.yaml <<'END'
    ${recipe}
    END
    perturbdiff evaluate ${predictions} ${store} \\
        --out ${meta.id} --config recipe.yaml --method ${meta.method} \\
        --dataset ${meta.dataset} --seed ${meta.seed} --threads ${task.cpus} ${piece} ${once} \\
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
