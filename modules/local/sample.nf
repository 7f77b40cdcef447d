process SAMPLE {
    tag   "${meta.id}"
    label 'process_sample'
    label 'gpu'
    // the parts of a prediction as one job array; after -resume one by one, or what is left of an array would wait for
    // another run's
    array params.job_arrays && !workflow.resume && params.sample_shards > 1 ? params.sample_shards : 0

    input:
    tuple val(meta), path(bundle, stageAs: 'bundle/*'), path(store), path(split), val(recipe)

    output:
    tuple val(meta), path("${meta.id}.h5ad"),        emit: predictions
    tuple val(meta), path("${meta.id}.h5ad.*.json"), emit: records
    path 'versions.yml',                             emit: versions

    script:
    def args   = task.ext.args ?: ''
    def piece  = meta.shard ? "--shard ${meta.shard}" : ''
    def kept   = meta.step ? "${bundle}/steps/${"${meta.step}".padLeft(7, '0')}" : "${bundle}"
    def random = meta.step == 0 ? '--random-init' : ''   // before any training
    """
    cat > recipe.yaml <<'END'
    ${recipe}
    END
    perturbdiff sample ${kept} ${store} \\
        --split ${split} --part ${meta.part} --out ${meta.id}.h5ad --config recipe.yaml \\
        --seed ${meta.seed} ${random} ${piece} ${args}
    echo "${task.process.tokenize(':').last()}: \$(perturbdiff --version)" > versions.yml
    """

    stub:
    """
    echo '{"stage": "stub"}' > ${meta.id}.h5ad.manifest.json
    touch ${meta.id}.h5ad ${meta.id}.h5ad.run.json versions.yml
    """
}
