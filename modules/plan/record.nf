// What a run was given, written before its first task: OUTDIR/pipeline_info/run_STAMP.json.

// conf/base.config names the logs so; it cannot call a function
def logName(process, tag) {
    return [process.tokenize(':')[-1], tag].findAll().join('.').replaceAll(/[^\w.-]/, '_') + '.log'
}

def plain(value) {
    return value == null || value instanceof Number || value instanceof Boolean ? value : "${value}".toString()
}

def recordFile(given) {
    return file("${given.outdir}/pipeline_info/run_${given.report_stamp}.json", glob: false)
}

// metadata: the `workflow` of main.nf; image: what is known of the image, or null; images: of those of methods of
// others
def writeRecord(given, metadata, image, images) {
    def record = [
        command: metadata.commandLine, profile: metadata.profile, run: metadata.runName,
        session: "${metadata.sessionId}".toString(),
        resumed: metadata.resume, stub: metadata.stubRun, started: "${metadata.start}".toString(),
        user: metadata.userName,
        version: metadata.manifest.version, commit: metadata.commitId,
        nextflow: "${metadata.nextflow.version}".toString(),
        launched_in: "${metadata.launchDir}".toString(), work: "${metadata.workDir}".toString(),
        pipeline: "${metadata.projectDir}".toString(),
        image: image, baseline_images: images,
        parameters: new TreeMap(given.collectEntries { name, value -> [(name): plain(value)] }),
    ]
    recordFile(given).parent.mkdirs()
    recordFile(given).text = groovy.json.JsonOutput.prettyPrint(groovy.json.JsonOutput.toJson(record)) + '\n'
}
