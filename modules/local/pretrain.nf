include { quoted } from '../plan/characters'

process PRETRAIN {
    tag   "${meta.id}"
    label 'process_gpu'
    label 'gpu'
    label 'resumable'

    input:
    // meta.checkpoints: a folder; as a path every checkpoint written would spoil -resume
    tuple val(meta),
        path(stores),
        path(heldStores, stageAs: 'held?/*'),
        path(heldSplits, stageAs: 'held?/*'),
        path(tables, stageAs: 'tables?/*'),
        path(genes, stageAs: 'genes/*'),
        path(scored, stageAs: 'scored/*'),
        val(recipe)

    output:
    tuple val(meta), path("${meta.id}"), emit: bundle
    path 'versions.yml',                 emit: versions

    script:
    def args     = task.ext.args ?: ''
    def semantic = [meta.kinds, [tables].flatten()].transpose()
        .collect { kind, table -> "--embedding ${kind}=${table}" }.join(' ')
    def held     = [[heldStores].flatten(), [heldSplits].flatten()].transpose()
        .collect { store, split -> "--downstream ${store}:${split}" }.join(' ')
    def chosen   = genes ? "--genes ${genes}" : ''
    def wanted   = scored ? "--scored-on ${scored}" : ''
    """
    cat > recipe.yaml <<'END'
    ${recipe}
    END
    key=\$(pd-digest ${stores} ${heldStores} ${heldSplits} ${tables} ${genes})
    pd-launch pretrain ${stores} \\
        --out ${meta.id} --config recipe.yaml ${semantic} ${chosen} ${wanted} ${held} \\
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
