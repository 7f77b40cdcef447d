process SAMPLE {
    tag   "${meta.id}"
    label 'process_sample'
    label 'gpu'

    input:
    tuple val(meta), path(bundle), path(store), path(split), val(recipe)

    output:
    tuple val(meta), path("${meta.id}.h5ad"), emit: predictions
    path 'versions.yml',                      emit: versions

    script:
    def args = task.ext.args ?: ''
    """
    cat > recipe.yaml <<'END'
    ${recipe}
    END
    perturbdiff sample ${bundle} ${store} --split ${split} --out ${meta.id}.h5ad --config recipe.yaml --seed ${meta.seed} ${args}
    echo "${task.process.tokenize(':').last()}: \$(perturbdiff --version)" > versions.yml
    """

    stub:
    """
    touch ${meta.id}.h5ad versions.yml
    """
}
