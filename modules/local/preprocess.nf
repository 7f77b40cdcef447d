process PREPROCESS {
    tag   "${meta.id}"
    label 'process_preprocess'
    label 'cpu'

    input:
    tuple val(meta), path(inputs, stageAs: 'input?/*'), path(obs, stageAs: 'obs?/*'), path(split),
        path(aliases, stageAs: 'aliases/*'), path(genes, stageAs: 'genes/*'), val(recipe)

    output:
    tuple val(meta), path("${meta.id}"), emit: store
    path 'versions.yml',                 emit: versions

    script:
    def args     = task.ext.args ?: ''
    def training = split ? "--split ${split}" : ''
    def labels   = [obs].flatten().collect { table -> "--obs ${table}" }.join(' ')
    def chosen   = genes ? "--genes ${genes}" : ''
    """
    cat > recipe.yaml <<'END'
    ${recipe}
    END
    perturbdiff preprocess ${inputs} --out ${meta.id} --config recipe.yaml ${labels} ${training} ${chosen} \\
        --seed ${meta.seed} --jobs "\${OMP_NUM_THREADS:-1}" \${PD_MEMORY:+--memory-limit "\$PD_MEMORY"} ${args}
    echo "${task.process.tokenize(':').last()}: \$(perturbdiff --version)" > versions.yml
    """

    stub:
    """
    mkdir ${meta.id}
    echo '{"stage": "stub"}' > ${meta.id}/manifest.json
    touch versions.yml
    """
}
