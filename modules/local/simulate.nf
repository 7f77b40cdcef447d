process SIMULATE {
    tag   "${meta.id}"
    label 'process_low'
    label 'cpu'

    input:
    tuple val(meta), val(recipe)

    output:
    tuple val(meta), path("${meta.id}/counts.h5ad"),     emit: counts
    tuple val(meta), path("${meta.id}/effects.parquet"), emit: truth
    path "${meta.id}/*.json",                            emit: records
    path 'versions.yml',                                 emit: versions

    script:
    """
    cat > recipe.yaml <<'END'
    ${recipe}
    END
    perturbdiff simulate --out ${meta.id} --config recipe.yaml --seed ${meta.seed}
    echo "${task.process.tokenize(':').last()}: \$(perturbdiff --version)" > versions.yml
    """

    stub:
    """
    mkdir ${meta.id}
    echo '{"stage": "stub", "files": {"counts.h5ad": {}, "effects.parquet": {}}}' > ${meta.id}/manifest.json
    touch ${meta.id}/counts.h5ad ${meta.id}/effects.parquet versions.yml
    """
}
