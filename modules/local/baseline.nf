process BASELINE {
    tag   "${meta.id}"
    label 'process_medium'
    label 'cpu'

    input:
    tuple val(meta), path(store), path(split), path(tables, stageAs: 'tables?/*')

    output:
    tuple val(meta), path("${meta.id}.h5ad"), emit: predictions
    path "${meta.id}.h5ad.*.json",            emit: records
    path 'versions.yml',                      emit: versions

    script:
    def vectors = [meta.kinds, [tables].flatten()].transpose()
        .collect { kind, table -> "--embedding ${kind}=${table}" }.join(' ')
    """
    perturbdiff baseline ${meta.name} ${store} ${vectors} \\
        --split ${split} --part ${meta.part} --out ${meta.id}.h5ad --seed ${meta.seed}
    echo "${task.process.tokenize(':').last()}: \$(perturbdiff --version)" > versions.yml
    """

    stub:
    """
    echo '{"stage": "stub"}' > ${meta.id}.h5ad.manifest.json
    touch ${meta.id}.h5ad ${meta.id}.h5ad.run.json versions.yml
    """
}
