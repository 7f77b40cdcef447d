process REPORT {
    label 'process_low'
    label 'cpu'

    input:
    path metrics
    path bundles
    path statistics
    path splits
    val options

    output:
    path 'report.html',    emit: page
    path 'report.txt',     emit: table
    path 'report_figures', emit: figures
    path 'report_mqc',     emit: multiqc
    path 'versions.yml',   emit: versions

    script:
    def extra = [bundle: bundles, stats: statistics, split: splits]
        .collectMany { option, paths -> [paths].flatten().collect { path -> "--${option} ${path}" } }.join(' ')
    """
    perturbdiff report ${metrics} --out report.html ${extra} ${options} | tee report.txt
    echo "${task.process.tokenize(':').last()}: \$(perturbdiff --version)" > versions.yml
    """

    stub:
    """
    mkdir report_figures report_mqc
    touch report.html report.txt versions.yml report_figures/figure.svg report_mqc/perturbdiff_scores_mqc.json
    """
}
