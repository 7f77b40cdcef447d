// What is known of the image that tasks run in, before the first of them starts.

// Standard output of a command, or null if it is missing or fails; what it complains of goes to the log.
def outputOf(command) {
    try {
        def process = command.execute()
        def said    = new StringBuilder()
        def wrong   = new StringBuilder()
        process.waitForProcessOutput(said, wrong)
        if (process.exitValue() == 0) { return said.toString() }
        log.debug "${command[0]}: ${wrong}"
    }
    catch (java.io.IOException problem) { log.debug "${command[0]}: ${problem.message}" }
    return null
}

// bin/build-image writes them; an image made elsewhere has none
def labelsOf(path) {
    def said   = outputOf(['apptainer', 'inspect', '--json', '--labels', path])
    def labels = said ? new groovy.json.JsonSlurper().parseText(said).data.attributes.labels ?: [:] : [:]
    def named  = { name -> labels[name] && labels[name] != 'unknown' ? labels[name] : null }
    return [
        version: named.call('org.opencontainers.image.version'),
        commit: named.call('org.opencontainers.image.revision'),
        dirty: named.call('org.perturbdiff.dirty')?.toBoolean(),
        lock_sha256: named.call('org.perturbdiff.lock.sha256'),
    ]
}

// container: absolute path of an image file, or a name that docker or a registry knows (named), or null → Map or null.
// id is the file's digest, kept beside the image; null for an image in a registry, whose name may have one.
def imageRecord(container, named = false) {
    if (!container) { return null }
    def name = "${container}".toString()
    if (named || name.contains('://')) {
        return [path: name, id: name.contains('@sha256:') ? name.substring(name.indexOf('@') + 1) : null]
    }
    def image = new java.io.File(name)
    if (!image.file) { error("--container: there is no image ${name} (bin/build-image makes one)") }
    def tool = "${projectDir}/bin/image-digest".toString()
    if (image.length() > (1 << 30) && !outputOf([tool, '--kept', name])) {
        log.info "perturbdiff: reading ${name} once for its digest"
    }
    def digest = outputOf([tool, name])?.trim()
    def record = [path: name, id: digest, bytes: image.length()] + labelsOf(name)
    if (record.version && record.version != workflow.manifest.version) {
        log.warn "the image holds perturbdiff ${record.version} and this is the workflow of " +
            "${workflow.manifest.version}; make a new one with bin/build-image"
    }
    return record
}
