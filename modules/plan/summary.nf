// What is said at the end. `params` and `workflow` are those of this script: in an onComplete closure of the entry
// workflow the latter is null.

include { logName    } from './record'
include { writeCrate } from './crate'

// the last words of a task; what fails before the command, e.g. a module that cannot be loaded, is in the wrapper's
// log alone
def lastWords(task) {
    def said = ['.command.err', '.command.log'].collect { name -> file("${task.workdir}/${name}") }
        .collect { log -> log.exists() ? log.readLines().findAll { line -> line.trim() } : [] }
        .find { lines -> lines }
    return said ? said[-1].trim() : 'no message'
}

// what the failed tasks said last: an ignored error is not shown otherwise
def complaints() {
    def records = file("${params.outdir}/pipeline_info/trace_${params.report_stamp}.tsv")
    if (!records.exists()) { return [] }
    def tasks = records.splitCsv(header: true, sep: '\t')
    def well  = tasks.findAll { task -> task.status in ['COMPLETED', 'CACHED'] }.collect { task -> task.name }
    // the last try of each task that did not succeed in the end
    def failed = tasks.findAll { task -> task.status == 'FAILED' && !(task.name in well) }
        .reverse().unique { task -> task.name }
    return failed.collect { task ->
        def own  = file("${params.outdir}/logs/${logName(task.process, task.tag == '-' ? null : task.tag)}")
        def kept = own.exists() ? "log ${own}" : 'no log'
        "${task.name} (exit ${task.exit}): ${lastWords(task)}\n    ${kept}, work folder ${task.workdir}"
    }
}

def summarise() {
    def stats  = workflow.stats
    def failed = complaints()
    log.info "perturbdiff: ${stats.succeedCount} tasks ran, ${stats.cachedCount} cached, " +
        "${stats.retriesCount} retried, ${failed.size()} failed"
    if (failed) {
        log.warn 'these failed, and what needs them is missing from the report; mend them and run again with -resume' +
            "\n  ${failed.join('\n  ')}"
    }
    writeCrate()
    def page = "${params.outdir}/report.html"
    if (file(page).exists()) { log.info "perturbdiff: report in ${page}" }
    log.info "perturbdiff: logs in ${params.outdir}/logs, records of the run in ${params.outdir}/pipeline_info"
}
