include { told } from '../plan/characters'

process VOCABULARY {
    tag   "${meta.id}"
    label 'process_preprocess'
    label 'cpu'

    input:
    // meta.options: name → value; meta.named: the options that `given` are the files of
    tuple val(meta), path(studies, stageAs: 'study?/*'), path(added, stageAs: 'added?/*'),
        path(given, stageAs: 'given?/*'), path(aliases, stageAs: 'aliases/*'), val(recipe)

    output:
    tuple val(meta), path("${meta.id}"), emit: genes
    path 'versions.yml',                 emit: versions

    script:
    def args = task.ext.args ?: ''
    def more = [added].flatten().collect { one -> "--add ${one}" }.join(' ')
    """
    cat > recipe.yaml <<'END'
    ${recipe}
    END
    perturbdiff vocabulary build ${studies} --out ${meta.id} --config recipe.yaml ${more} ${told(meta, given)} \\
        --jobs "\${OMP_NUM_THREADS:-1}" \${PD_MEMORY:+--memory-limit "\$PD_MEMORY"} ${args}
    echo "${task.process.tokenize(':').last()}: \$(perturbdiff --version)" > versions.yml
    """

    stub:
    """
    mkdir ${meta.id}
    echo '{"stage": "stub", "files": {"genes.txt": {}}}' > ${meta.id}/manifest.json
    touch ${meta.id}/genes.txt versions.yml
    """
}
