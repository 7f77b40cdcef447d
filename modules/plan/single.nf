// An input that is no samplesheet is one run: `perturbdiff init` finds the counts and the columns in it, and writes the
// recipe and the sheet of that run. It reads labels and a few values, so it runs here, before the plan is made.

include { engineOf; takesName } from './site'
include { shown               } from './characters'

def isSingle(input) {
    return input.isDirectory() || input.name ==~ /(?i).*\.(h5ad|h5|zarr)/
}

// each argument is one word: no shell takes part
def commandOf(given, engine, input, folder) {
    def table = given.obs ? file(given.obs, checkIfExists: true, glob: false).toAbsolutePath() : null
    def init  = ['perturbdiff', 'init', "${input.toAbsolutePath()}".toString(), '--out', "${folder}".toString()] +
        (table ? ['--obs', "${table}".toString()] : [])
    if (!given.container) { return init }
    def name   = "${given.container}".toString()
    // a link is followed, maybe into a folder that tasks must see
    def seen   = [input, table].findAll().collectMany { path -> [path.toAbsolutePath(), path.toRealPath()] }
    def places = (seen.collect { path -> path.parent } + [folder] + (given.bind ? given.bind.tokenize(',') : []))
        .collect { place -> "${place}".contains(':') ? "${place}".toString() : "${place}:${place}".toString() }.unique()
    if (takesName(engine)) {
        return [engine, 'run', '--rm'] + places.collectMany { place -> ['-v', place] } + [name] + init
    }
    def image  = name.contains('://') ? name : new java.io.File(name).absolutePath
    return [engine ?: 'apptainer', 'exec'] + places.collectMany { place -> ['--bind', place] } + [image] + init
}

// the samplesheet that was given, or that of the single run
def sheetOf(given, profiles) {
    def input = file(given.input, checkIfExists: true, glob: false)
    if ("${given.input}".contains('://') || !isSingle(input)) {
        if (given.obs) { error('--obs: is for one file of counts (--input my.h5ad); a samplesheet has a column obs') }
        return input
    }
    def folder = file("${given.outdir}/plan", glob: false).toAbsolutePath()
    folder.mkdirs()
    def command = commandOf(given, engineOf(profiles), input, folder)
    def process
    try {
        process = new ProcessBuilder(command).redirectErrorStream(true).start()
    } catch (java.io.IOException _problem) {
        error("--input ${input.name}: '${command[0]}' is not on the PATH, and it has to look at the file; " +
            'install it, or give a samplesheet')
    }
    process.outputStream.close()
    def lines = process.inputStream.getText('UTF-8').readLines()
        .collect { line -> shown(line.replaceFirst(/^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [A-Z]+ /, '')) }
    def code  = process.waitFor()
    if (code) {
        [folder, folder.parent].each { place -> place.toFile().delete() }   // only if they are empty
        def told = lines.dropWhile { line -> !line.startsWith('error') }
        error("--input ${input.name} (perturbdiff init):\n  " + (told ?: lines).join('\n  '))
    }
    log.info "perturbdiff: one run of ${input.name}\n  " + lines.join('\n  ')
    return folder.resolve('samplesheet.csv')
}
