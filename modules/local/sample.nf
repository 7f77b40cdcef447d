include { quoted; told } from '../plan/characters'

process SAMPLE {
    tag   "${meta.id}"
    label 'process_sample'
    label 'gpu'
    // the parts of a prediction as one job array; after -resume one by one, or what is left of an array would wait for
    // another run's
    array "${params.job_arrays}" == 'true' && !workflow.resume && (params.sample_shards as int) > 1 ?
        params.sample_shards as int : 0

    input:
    // meta.changes: values of a bundle's own recipe that are changed, where there is no recipe here
    tuple val(meta), path(bundle, stageAs: 'bundle/*'), path(store), path(split),
        path(conditions, stageAs: 'conditions/*'), path(tables, stageAs: 'tables?/*'), val(recipe)

    output:
    tuple val(meta), path("${meta.id}.h5ad"),        emit: predictions
    tuple val(meta), path("${meta.id}.h5ad.*.json"), emit: records
    path 'versions.yml',                             emit: versions

    script:
    def args   = task.ext.args ?: ''
    def piece  = meta.shard ? "--shard ${meta.shard}" : ''
    def kept   = meta.step ? "${bundle}/steps/${"${meta.step}".padLeft(7, '0')}" : "${bundle}"
    def wanted = conditions ? "--conditions ${conditions}" : "--split ${split} --part ${meta.part}"
    def known  = [meta.kinds, [tables].flatten()].transpose()
        .collect { kind, table -> "--embedding ${kind}=${table}" }.join(' ')
    def method = recipe ? '--config recipe.yaml' :
        meta.changes.collect { change -> "--set ${quoted(change)}" }.join(' ')
    def random = meta.step == 0 ? '--random-init' : ''   // before any training
    """
    cat > recipe.yaml <<'END'
    ${recipe}
    END
    perturbdiff sample ${kept} ${store} \\
        ${wanted} --out ${meta.id}.h5ad ${method} ${known} ${told(meta, [])} \\
        --seed ${meta.seed} ${random} ${piece} ${args}
    echo "${task.process.tokenize(':').last()}: \$(perturbdiff --version)" > versions.yml
    """

    stub:
    """
    echo '{"stage": "stub"}' > ${meta.id}.h5ad.manifest.json
    touch ${meta.id}.h5ad ${meta.id}.h5ad.run.json versions.yml
    """
}
