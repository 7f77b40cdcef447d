include { quoted } from '../plan/characters'

process FINETUNE {
    tag   "${meta.id}"
    label 'process_gpu'
    label 'gpu'
    label 'resumable'

    input:
    // meta.checkpoints: a folder; as a path every checkpoint written would spoil -resume
    tuple val(meta),
        path(store),
        path(split),
        path(init, stageAs: 'pretrained/*'),
        path(tables, stageAs: 'tables?/*'),
        path(scored, stageAs: 'scored/*'),
        val(recipe)

    output:
    tuple val(meta), path("${meta.id}"), emit: bundle
    path 'versions.yml',                 emit: versions

    script:
    def args     = task.ext.args ?: ''
    def semantic = [meta.kinds, [tables].flatten()].transpose()
        .collect { kind, table -> "--embedding ${kind}=${table}" }.join(' ')
    def wanted   = scored ? "--scored-on ${scored}" : ''
    """
    cat > recipe.yaml <<'END'
    ${recipe}
    END
    key=\$(pd-digest ${init} ${store} ${split} ${tables})
    pd-launch finetune ${init} ${store} \\
        --split ${split} --out ${meta.id} --transfer ${meta.transfer} --config recipe.yaml ${semantic} \\
        ${wanted} \\
        --seed ${meta.seed} --checkpoints ${quoted(meta.checkpoints)}-\$key ${args}
    echo "${task.process.tokenize(':').last()}: \$(pd-launch --version)" > versions.yml
    """

    stub:
    """
    mkdir ${meta.id}
    echo '{"stage": "stub"}' > ${meta.id}/manifest.json
    touch versions.yml
    """
}
