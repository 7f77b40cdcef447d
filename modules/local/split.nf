process SPLIT {
    tag   "${meta.id}"
    label 'process_low'
    label 'cpu'

    input:
    tuple val(meta), path(source, stageAs: 'source/*'), path(obs, stageAs: 'obs/*'),
        path(toml, stageAs: 'toml/*'), val(recipe)

    output:
    tuple val(meta), path("${meta.id}.parquet"), emit: split
    path "${meta.id}.parquet.*",                 emit: records
    path 'versions.yml',                         emit: versions

    script:
    def labels = obs ? "--obs ${obs}" : ''
    def rule   = toml ? "--toml ${toml}" : ''
    """
    cat > recipe.yaml <<'END'
    ${recipe}
    END
    perturbdiff split ${source} --out ${meta.id}.parquet --config recipe.yaml ${labels} ${rule} --seed ${meta.seed}
    echo "${task.process.tokenize(':').last()}: \$(perturbdiff --version)" > versions.yml
    """

    stub:
    """
    echo '{"stage": "stub"}' > ${meta.id}.parquet.manifest.json
    touch ${meta.id}.parquet ${meta.id}.parquet.counts.csv versions.yml
    """
}
