// Where results are published. Nextflow replaces what lies at a result's name, a folder with all that is in it; so
// before the first task it is made sure that an earlier run made what lies there: its manifest lists every file.

include { isFitted } from './models'
include { shown    } from './characters'

// what this run publishes, below outdir
def targetsOf(plan) {
    def bundles = plan.runs.findAll { run -> isFitted(run.mode) }.collect { run -> run.id }
    def made    = (plan.models + plan.baselines + plan.externals).collect { one -> one.id }
    def scored  = (plan.models.findAll { run -> !run.conditions } + plan.baselines + plan.externals)
        .collect { one -> one.id }
    def stats   = (plan.pairs + plan.bare).collect { one -> one.id }
    return plan.simulations.collect { one -> "simulated/${one.id}" } +
        plan.stores.findAll { one -> !one.ready }.collect { one -> "stores/${one.id}" } +
        plan.vocabularies.collect { one -> "vocabularies/${one.id}" } +
        plan.embeddings.collect { one -> "embeddings/${one.id}.parquet" } +
        plan.imports.collect { one -> "models/${one.id}" } +
        plan.splits.collect { one -> "splits/${one.id}.parquet" } +
        stats.collect { id -> "statistics/${id}.stats" } +
        bundles.collect { id -> "models/${id}" } +
        made.collect { id -> "predictions/${id}.h5ad" } +
        scored.collect { id -> "metrics/${id}.metrics" } +
        plan.calibrations.collect { one -> "calibration/${one.id}" } +
        plan.ends.collect { one -> "ends/${one.id}" } +
        plan.ceilings.collect { one -> "metrics/${one.id}" } + ['report.html']
}

// names of results that would be one file, also where capitals do not count, and runs named as what tasks work with
def nameProblems(plan) {
    def same     = targetsOf(plan).groupBy { path -> path.toString().toLowerCase() }.values()
    def results  = same.findAll { paths -> paths.size() > 1 }
        .collect { paths -> "${paths.unique(false).join(' and ')} would be one result: change an id" }
    def reserved = ['recipe.yaml', 'versions.yml', 'pretrained'] +
        plan.stores.collect { one -> (one.ready?.name ?: one.id).toLowerCase() } +
        plan.splits.collect { one -> "${one.id}.parquet".toLowerCase() }
    def ids      = (plan.runs + plan.vocabularies + plan.embeddings + plan.imports).collect { run -> run.id }
    def isTaken  = { id ->
        id.toLowerCase() in reserved || id ==~ /(?i)(tables|held)\d*/ || id =~ /(?i)\.part-\d+-of-\d+$/
    }
    return results + ids.findAll { id -> isTaken.call(id) }
        .collect { id -> "id '${id}': files of tasks are named so; choose another" }
}

def real(path) {
    def given = new java.io.File("${path}").absoluteFile.toPath().normalize()
    return java.nio.file.Files.exists(given) ? given.toRealPath() : given
}

def isIn(path, folder) {
    return real(path).startsWith(real(folder))
}

// files that tasks read
def inputsOf(plan) {
    return (plan.stores.collectMany { one -> one.inputs + one.obs } + plan.files.collect { one -> one.file } +
        plan.splits.collect { one -> one.toml } +
        plan.vocabularies.collectMany { one -> one.studies + one.given } +
        plan.embeddings.collect { one -> one.names } + plan.imports.collectMany { one -> [one.checkpoint, one.genes] } +
        plan.runs.collectMany { run -> [run.bundle, run.script, run.conditions] })
        .flatten().findAll { file -> file && !"${file}".contains('://') }.unique()
}

// folders: launch folder and project folder
def placeProblems(outdir, folders, sheet, plan) {
    def home   = [(System.getProperty('user.home') ?: '/'): 'your home folder']
    def shared = (folders + home).findAll { folder, _what -> isIn(folder, outdir) }
        .collect { _folder, what -> "--outdir ${outdir} is or holds ${what}" }
    if (shared) { return ["${shared[0]}: name a new folder for the results"] }
    // the results of an earlier run may be read, if this one does not write them
    def earlier = ['embeddings', 'models', 'plan', 'predictions', 'simulated', 'splits', 'stores', 'vocabularies']
        .collect { name -> "${outdir}/${name}" }
    def own     = targetsOf(plan).collect { path -> "${outdir}/${path}" }
    def inputs  = inputsOf(plan)
    return ([sheet] + inputs).findAll { file -> isIn(file, outdir) && !earlier.any { folder -> isIn(file, folder) } }
        .collect { file -> "--outdir ${outdir} holds ${file}, which this run reads: name another folder" } +
        inputs.collectMany { file ->
            own.findAll { path -> isIn(file, path) || isIn(path, file) }.collect { path ->
                "${path} would be written, and ${file} is read: change an id, or name another --outdir"
            }
        }
}

def read(path) {
    try {
        def found = new groovy.json.JsonSlurper().parse(path.toFile())
        return found instanceof Map ? found : [:]
    } catch (Exception _problem) {
        return [:]
    }
}

def isThere(path) {
    return java.nio.file.Files.exists(path, java.nio.file.LinkOption.NOFOLLOW_LINKS)
}

def isFolder(path) {
    return java.nio.file.Files.isDirectory(path, java.nio.file.LinkOption.NOFOLLOW_LINKS)
}

// all that is no folder below a folder; links in it are not followed
def filesBelow(folder) {
    def found = []
    java.nio.file.Files.walk(folder).withCloseable { stream ->
        stream.forEach { path -> if (path != folder && !isFolder(path)) { found << path } }
    }
    return found
}

def listedIn(manifest, run) {
    return [manifest, run]
        .collectMany { record -> record.files instanceof Map ? record.files.keySet() as List : [] } as Set
}

// what lies at a result that is a folder and is no part of it
def strangersIn(place) {
    // published as a link: it goes, and nothing with it
    if (!java.nio.file.Files.isDirectory(place)) { return java.nio.file.Files.isSymbolicLink(place) ? [] : [place] }
    def folder = place.toRealPath()
    def listed = listedIn(read(folder.resolve('manifest.json')), read(folder.resolve('run.json')))
    def known  = read(folder.resolve('manifest.json')).stage ? listed + ['manifest.json', 'run.json'] : []
    return filesBelow(folder).findAll { path -> !(folder.relativize(path).toString() in known) }
}

// of one that is a file, with what lies beside it
def strangersAt(place, beside) {
    def name     = { suffix -> place.resolveSibling("${place.fileName}${suffix}".toString()) }
    def manifest = name.call('.manifest.json')
    if (read(manifest).stage && !java.nio.file.Files.isDirectory(place)) { return [] }
    return (['', '.manifest.json', '.run.json'] + beside).collect { suffix -> name.call(suffix) }
        .findAll { path -> isThere(path) }
}

// the tables and figures of the report, known by its manifest
def strangersOfReport(folder) {
    def listed = listedIn(read(folder.resolve('report.html.manifest.json')), [:])
    def others = ['figures', 'tables', 'mqc'].collectMany { name ->
        def part = folder.resolve("report_${name}".toString())
        if (!java.nio.file.Files.isDirectory(part)) {
            return java.nio.file.Files.isSymbolicLink(part) || !isThere(part) ? [] : [part]
        }
        def root = part.toRealPath()
        return filesBelow(root).findAll { path -> !("${name}/${root.relativize(path)}".toString() in listed) }
    }
    def page = strangersAt(folder.resolve('report.html'), [])
    def table = folder.resolve('report.txt')
    return others + page + (listed || page || !isThere(table) ? [] : [table])
}

// what is written without a manifest of its own is ours where the record of a run lies
def strangersOfRecords(folder) {
    def records = folder.resolve('pipeline_info')
    def logs    = folder.resolve('logs')
    if (records.toFile().list()?.any { name -> name ==~ /run_.*\.json/ }) { return [] }
    return [records.resolve('design.csv'), records.resolve('versions.yml')].findAll { path -> isThere(path) } +
        (java.nio.file.Files.isDirectory(logs) ? filesBelow(logs) : isThere(logs) ? [logs] : [])
}

// files in outdir that would be replaced although no run of the workflow made them
def strangers(outdir, plan) {
    def folder = new java.io.File("${outdir}").absoluteFile.toPath()
    def named  = targetsOf(plan).findAll { path -> path != 'report.html' }
    return strangersOfRecords(folder) + strangersOfReport(folder) + named.collectMany { path ->
        def place = folder.resolve("${path}".toString())
        if (path ==~ /.*\.(h5ad|parquet)/) {
            return strangersAt(place, path.startsWith('splits/') ? ['.counts.csv'] : [])
        }
        return isThere(place) ? strangersIn(place) : []
    }
}

// held until Nextflow ends; a lock that the file system does not know is no lock
def holdFolder(outdir) {
    def records = new java.io.File("${outdir}", 'pipeline_info').absoluteFile.toPath()
    java.nio.file.Files.createDirectories(records)
    try {
        def options = [
            java.nio.file.StandardOpenOption.CREATE, java.nio.file.StandardOpenOption.WRITE,
            java.nio.file.LinkOption.NOFOLLOW_LINKS,
        ] as Set
        def channel = java.nio.channels.FileChannel.open(records.resolve('.lock'), options)
        if (!channel.tryLock()) {
            return ["another run of the workflow writes to --outdir ${outdir} now: wait for it, or name another folder"]
        }
        nextflow.Global.session.onShutdown { channel.close() }
    } catch (java.io.IOException problem) {
        log.debug "${records}: ${problem.message}"
    }
    return []
}

def checkPublishing(given, metadata, sheet, plan) {
    def folders  = [
        ("${metadata.launchDir}".toString()): 'the folder that Nextflow was started in',
        ("${metadata.projectDir}".toString()): "the workflow's own folder",
    ]
    def problems = nameProblems(plan) + (placeProblems(given.outdir, folders, sheet, plan) ?: holdFolder(given.outdir))
    if (!problems) {
        def found = strangers(given.outdir, plan).collect { path -> "${path}".toString() }.unique()
        problems  = found.take(10) + (found.size() > 10 ? ["and ${found.size() - 10} more"] : [])
        if (problems) {
            def told = 'these lie where results go, and no run of the workflow made them ' +
                '(its manifest would list them): move them away, or name another --outdir'
            problems = [told] + problems
        }
    }
    if (problems) { error("nothing was touched:\n  " + problems.collect { one -> shown(one) }.join('\n  ')) }
}
