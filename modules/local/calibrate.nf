process CALIBRATE {
    tag   "${meta.id}"
    label 'process_medium'
    label 'cpu'

    input:
    tuple val(meta), path(store), path(split), val(recipe),
        path(genes, stageAs: 'genes/*'), path(targets, stageAs: 'targets/*')

    output:
    tuple val(meta), path("${meta.id}"), emit: calibration
    path 'versions.yml',                 emit: versions

    script:
    def chosen = genes ? "--genes ${genes}" : ''
    def table = targets ? "--targets ${targets}" : ''
    """
    cat > recipe.yaml <<'END'
    ${recipe}
    END
    perturbdiff calibrate ${store} \\
        --split ${split} --part ${meta.part} --out ${meta.id} --config recipe.yaml \\
        --dataset ${meta.dataset} --seed ${meta.seed} --threads ${task.cpus} \\
        ${chosen} ${table}
    echo "${task.process.tokenize(':').last()}: \$(perturbdiff --version)" > versions.yml
    """

    stub:
    """
    mkdir ${meta.id}
    echo '{"stage": "stub", "files": {"calibration.csv": {}}}' > ${meta.id}/manifest.json
    touch ${meta.id}/calibration.csv versions.yml
    """
}
