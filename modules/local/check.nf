// A published data set against its recipe and split, before hours are spent on it: a problem stops what needs it.
process CHECK {
    tag   "${meta.id}"
    label 'process_low'
    label 'cpu'

    input:
    tuple val(meta), path(inputs, stageAs: 'input?/*'), path(obs, stageAs: 'obs?/*'), path(toml, stageAs: 'toml/*'),
        path(aliases, stageAs: 'aliases/*'), path(genes, stageAs: 'genes/*'), val(recipe)

    output:
    tuple val(meta), path("${meta.id}.check.txt"), emit: checked
    path 'versions.yml',                           emit: versions

    script:
    def labels = [obs].flatten().collect { table -> "--obs ${table}" }.join(' ')
    def held   = toml ? "--toml ${toml}" : ''
    def chosen = genes ? "--genes ${genes}" : ''
    """
    cat > recipe.yaml <<'END'
    ${recipe}
    END
    perturbdiff data check ${inputs} --config recipe.yaml ${labels} ${held} ${chosen} | tee ${meta.id}.check.txt
    echo "${task.process.tokenize(':').last()}: \$(perturbdiff --version)" > versions.yml
    """

    stub:
    """
    touch ${meta.id}.check.txt versions.yml
    """
}
