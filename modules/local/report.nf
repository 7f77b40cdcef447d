process REPORT {
    label 'process_low'
    label 'cpu'

    input:
    path metrics
    path bundles
    path statistics
    path splits
    path records, stageAs: 'records/*'
    tuple val(expected), val(missing)   // the second only for -resume: another value each time that something is missing
    val design      // lines of a CSV: what each run is in the comparison; or none
    path published
    val options

    output:
    path 'report.html',    emit: page
    path 'report.txt',     emit: table
    path 'report_figures', emit: figures
    path 'report_mqc',     emit: multiqc
    path 'report_tables',  emit: tables
    path 'versions.yml',   emit: versions

    script:
    def compared = design ? '--design design.csv' : ''
    def extra = [bundle: bundles, stats: statistics, split: splits, published: published]
        .collectMany { option, paths -> [paths].flatten().collect { path -> "--${option} ${path}" } }.join(' ')
    """
    printf '%s\\n' ${expected.collect { line -> "'${line}'" }.join(' ')} > expected.csv
    printf '%s\\n' ${design.collect { line -> "'${line}'" }.join(' ')} > design.csv
    perturbdiff report ${metrics} --out report.html ${extra} --records records --expected expected.csv ${compared} --logs "\$(dirname "\${PD_LOG:-logs/x}")" ${options} | tee report.txt
    echo "${task.process.tokenize(':').last()}: \$(perturbdiff --version)" > versions.yml
    """

    stub:
    """
    mkdir report_figures report_mqc report_tables
    touch report.html report.txt versions.yml report_figures/figure.svg report_mqc/perturbdiff_scores_mqc.json report_tables/failed.csv
    """
}
