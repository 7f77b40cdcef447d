include { quoted } from '../plan/characters'

process REPORT {
    label 'process_low'
    label 'cpu'

    input:
    // meta.options: name and value of further ones; meta.design: lines of a CSV, what each run is in the comparison, or
    // none; meta.missing: only for -resume, another value each time that something is missing
    tuple val(meta), path(metrics, stageAs: 'metrics/*'), path(published)
    path bundles, stageAs: 'models/*'
    path statistics, stageAs: 'statistics/*'
    path splits, stageAs: 'splits/*'
    path records, stageAs: 'records/*'

    output:
    path 'report.html',        emit: page
    path 'report.html.*.json', emit: records
    path 'report.txt',         emit: table
    path 'report_figures',     emit: figures
    path 'report_mqc',         emit: multiqc
    path 'report_tables',      emit: tables
    path 'versions.yml',       emit: versions

    script:
    def given    = meta.options.collect { name, value -> "--${name}=${quoted(value)}" }.join(' ')
    def compared = meta.design ? '--design design.csv' : ''
    def extra    = [bundle: bundles, stats: statistics, split: splits, published: published]
        .collectMany { option, paths -> [paths].flatten().collect { path -> "--${option} ${path}" } }.join(' ')
    """
    printf '%s\\n' ${meta.expected.collect { line -> quoted(line) }.join(' ')} > expected.csv
    printf '%s\\n' ${meta.design.collect { line -> quoted(line) }.join(' ')} > design.csv
    perturbdiff report ${metrics} \\
        --out report.html ${extra} --records records --expected expected.csv ${compared} \\
        --logs "\$(dirname "\${PD_LOG:-logs/x}")" ${given} | tee report.txt
    echo "${task.process.tokenize(':').last()}: \$(perturbdiff --version)" > versions.yml
    """

    stub:
    """
    mkdir report_figures report_mqc report_tables
    touch report_figures/figure.svg report_mqc/perturbdiff_scores_mqc.json report_tables/failed.csv
    cat > report.html.manifest.json <<'END'
    {"stage": "stub",
     "files": {"figures/figure.svg": {}, "mqc/perturbdiff_scores_mqc.json": {}, "tables/failed.csv": {}}}
    END
    touch report.html report.txt versions.yml
    """
}
