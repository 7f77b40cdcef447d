// Gene lists that can be read here, compared before any task: a gene that is scored and that the model lacks would be
// told by `evaluate`, after the training.
// Without includes, as several scripts include it: the strict parser takes no others twice.

// the genes of a text file, or of the folder of a vocabulary or a bundle; null: not known here
def listedIn(path) {
    if (!path || "${path}".contains('://') || !path.exists()) { return null }
    if (path.isDirectory()) {
        def bundled = path.resolve('genes.json')
        if (bundled.exists()) { return new groovy.json.JsonSlurper().parseText(bundled.text) as List }
        return path.resolve('genes.txt').exists() ? listedIn(path.resolve('genes.txt')) : null
    }
    if (path.name ==~ /(?i).*\.(pkl|pickle|npy|json|parquet)/) { return null }
    return path.readLines().collect { line -> line.trim() }.findAll { line -> line && !line.startsWith('#') }
}

// scored, had: lists as above; what: names of both, for the message
def lackProblems(scored, had, what) {
    if (scored == null || had == null) { return [] }
    def missing = (scored - had).sort()
    def some    = missing.take(3).join(', ') + (missing.size() > 3 ? ', …' : '')
    return missing ? ["${missing.size()} of the ${scored.size()} genes of ${what[0]} are not in ${what[1]}, so that " +
        "predictions could not be scored: ${some}"] : []
}
