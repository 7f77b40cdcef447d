include { told } from '../plan/characters'

// A checkpoint of the authors' code as a bundle.
process IMPORT {
    tag   "${meta.id}"
    label 'process_medium'
    label 'cpu'

    input:
    // meta.options: name → value
    tuple val(meta), path(checkpoint, stageAs: 'checkpoint/*'), path(genes, stageAs: 'genes/*'),
        path(tables, stageAs: 'tables?/*')

    output:
    tuple val(meta), path("${meta.id}"), emit: bundle
    path 'versions.yml',                 emit: versions

    script:
    def chosen   = genes ? "--genes ${genes}" : ''
    def semantic = [meta.kinds, [tables].flatten()].transpose()
        .collect { kind, table -> "--embedding ${kind}=${table}" }.join(' ')
    """
    perturbdiff import-checkpoint ${checkpoint} --out ${meta.id} ${chosen} ${semantic} ${told(meta, [])}
    echo "${task.process.tokenize(':').last()}: \$(perturbdiff --version)" > versions.yml
    """

    stub:
    """
    mkdir ${meta.id}
    echo '{"stage": "stub"}' > ${meta.id}/manifest.json
    touch versions.yml
    """
}
