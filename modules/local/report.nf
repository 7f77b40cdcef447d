include { quoted } from '../plan/characters'

process REPORT {
    label 'process_low'
    label 'cpu'

    input:
    path metrics, stageAs: 'metrics/*'
    path bundles, stageAs: 'models/*'
    path statistics, stageAs: 'statistics/*'
    path splits, stageAs: 'splits/*'
    path records, stageAs: 'records/*'
    tuple val(expected), val(missing)   // the second only for -resume: another value each time that something is missing
    val design      // lines of a CSV: what each run is in the comparison; or none
    path published
    val options     // name and value of further ones

    output:
    path 'report.html',    emit: page
    path 'report.html.*.json', emit: records
    path 'report.txt',     emit: table
    path 'report_figures', emit: figures
    path 'report_mqc',     emit: multiqc
    path 'report_tables',  emit: tables
    path 'versions.yml',   emit: versions

    script:
    def given    = options.collect { name, value -> "--${name}=${quoted(value)}" }.join(' ')
    def compared = design ? '--design design.csv' : ''
    def extra = [bundle: bundles, stats: statistics, split: splits, published: published]
        .collectMany { option, paths -> [paths].flatten().collect { path -> "--${option} ${path}" } }.join(' ')
    """
    printf '%s\\n' ${expected.collect { line -> quoted(line) }.join(' ')} > expected.csv
    printf '%s\\n' ${design.collect { line -> quoted(line) }.join(' ')} > design.csv
    perturbdiff report ${metrics} --out report.html ${extra} --records records --expected expected.csv ${compared} --logs "\$(dirname "\${PD_LOG:-logs/x}")" ${given} | tee report.txt
    echo "${task.process.tokenize(':').last()}: \$(perturbdiff --version)" > versions.yml
    """

    stub:
    """
    mkdir report_figures report_mqc report_tables
    echo '{"stage": "stub", "files": {"figures/figure.svg": {}, "mqc/perturbdiff_scores_mqc.json": {}, "tables/failed.csv": {}}}' > report.html.manifest.json
    touch report.html report.txt versions.yml report_figures/figure.svg report_mqc/perturbdiff_scores_mqc.json report_tables/failed.csv
    """
}
