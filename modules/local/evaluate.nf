process EVALUATE {
    tag   "${meta.id}"
    label 'process_medium'
    label 'cpu'

    input:
    tuple val(meta), path(predictions), path(store), val(recipe)

    output:
    tuple val(meta), path("${meta.id}"), emit: metrics
    path 'versions.yml',                 emit: versions

    script:
    def part = meta.shard ? "--shard ${meta.shard}" : ''
    """
    cat > recipe.yaml <<'END'
    ${recipe}
    END
    perturbdiff evaluate ${predictions} ${store} --out ${meta.id} --config recipe.yaml --method ${meta.method} --dataset ${meta.dataset} --seed ${meta.seed} --threads ${task.cpus} ${part}
    echo "${task.process.tokenize(':').last()}: \$(perturbdiff --version)" > versions.yml
    """

    stub:
    """
    mkdir ${meta.id}
    touch ${meta.id}/metrics.parquet ${meta.id}/aggregate.csv versions.yml
    """
}
