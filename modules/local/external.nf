include { quoted } from '../plan/characters'

// An external method (docs/baselines.md), or a user's own script that speaks the same protocol (docs/adapters.md).
process EXTERNAL {
    tag   "${meta.id}"
    label 'process_external'
    label 'gpu'
    container { meta.image }   // comes before the image of all other tasks in conf/apptainer.config

    input:
    tuple val(meta), path(store), path(split), path(script, stageAs: 'script/*'), val(recipe)

    output:
    tuple val(meta), path("${meta.id}.h5ad"), emit: predictions
    path "${meta.id}.h5ad.*.json",            emit: records
    path 'versions.yml',                      emit: versions

    script:
    def args = task.ext.args ?: ''
    def own  = (script ? "--script ${script}" : '') + (meta.python ? " --python ${quoted(meta.python)}" : '')
    // threads: those of the job, by the environment, so that another number of CPUs keeps -resume
    """
    cat > recipe.yaml <<'END'
    ${recipe}
    END
    perturbdiff baseline ${meta.name} ${store} \\
        --split ${split} --part ${meta.part} --out ${meta.id}.h5ad --config recipe.yaml \\
        --seed ${meta.seed} --threads "\${OMP_NUM_THREADS:-1}" ${own} ${args}
    echo "${task.process.tokenize(':').last()}: \$(perturbdiff --version)" > versions.yml
    """

    stub:
    """
    echo '{"stage": "stub"}' > ${meta.id}.h5ad.manifest.json
    touch ${meta.id}.h5ad ${meta.id}.h5ad.run.json versions.yml
    """
}
