// The folder of results as an RO-Crate: ro-crate-metadata.json says what the workflow was given and what it made, by
// the profile Workflow Run Crate (https://w3id.org/ro/wfrun). `params` and `workflow` are those of this script.

def profiles() {
    return ['https://w3id.org/ro/wfrun/process/0.5', 'https://w3id.org/ro/wfrun/workflow/0.5',
        'https://w3id.org/workflowhub/workflow-ro-crate/1.0']
}

def linkOf(one) {
    return ['@id': one['@id']]
}

def formatOf(name) {
    def types = [html: 'text/html', txt: 'text/plain', csv: 'text/csv', json: 'application/json', nf: 'text/plain',
        yml: 'application/yaml', h5ad: 'application/x-hdf5', parquet: 'application/vnd.apache.parquet']
    return types[name.tokenize('.')[-1]] ?: 'application/octet-stream'
}

def timeOf(moment) {
    return moment.truncatedTo(java.time.temporal.ChronoUnit.SECONDS)
        .format(java.time.format.DateTimeFormatter.ofPattern("yyyy-MM-dd'T'HH:mm:ssxxx"))
}

// a file or folder below outdir
def partOf(path, outdir) {
    def name = outdir.relativize(path).toString()
    def id   = new URI(null, null, name, null).rawPath
    return path.isDirectory() ? ['@id': "${id}/".toString(), '@type': 'Dataset', name: name] :
        ['@id': id, '@type': 'File', name: name, contentSize: "${path.size()}".toString(),
            encodingFormat: formatOf(name)]
}

// what this and earlier runs published here
def resultsIn(outdir) {
    def folders = ['calibration', 'embeddings', 'ends', 'metrics', 'models', 'predictions', 'simulated', 'splits',
        'statistics', 'stores', 'vocabularies']
    def found = folders.collect { name -> outdir.resolve(name) }.findAll { path -> path.isDirectory() }
        .collectMany { folder -> folder.listFiles() as List }
    def pages = ['report.html', 'report.txt', 'report_figures', 'report_mqc', 'report_tables']
        .collect { name -> outdir.resolve(name) }.findAll { path -> path.exists() }
    return (found + pages).sort { path -> path.toString() }.collect { path -> partOf(path, outdir) }
}

def valuesOf() {
    return params.findAll { name, value -> value != null && !name.contains('-') }.sort().collect { name, value ->
        ['@id': "#param-${name}".toString(), '@type': 'PropertyValue', name: name, value: "${value}".toString(),
            exampleOfWork: ['@id': "#formal-${name}".toString()]]
    }
}

def formalOf(value) {
    return ['@id': value.exampleOfWork['@id'], '@type': 'FormalParameter', name: value.name, additionalType: 'Text',
        conformsTo: ['@id': 'https://bioschemas.org/profiles/FormalParameter/1.0-RELEASE']]
}

// all entities; records: files of this run
def entitiesOf(results, records, values) {
    def language = ['@id': 'https://w3id.org/workflowhub/workflow-ro-crate#nextflow', '@type': 'ComputerLanguage',
        name: 'Nextflow', identifier: 'https://www.nextflow.io/', version: "${workflow.nextflow.version}".toString()]
    def main = ['@id': 'pipeline_info/main.nf', '@type': ['File', 'SoftwareSourceCode', 'ComputationalWorkflow'],
        name: workflow.manifest.name, description: workflow.manifest.description, version: workflow.manifest.version,
        programmingLanguage: linkOf(language), encodingFormat: formatOf('main.nf'),
        conformsTo: ['@id': 'https://bioschemas.org/profiles/ComputationalWorkflow/1.0-RELEASE'],
        input: values.collect { one -> one.exampleOfWork }]
    def action = ['@id': "#${workflow.sessionId}-${workflow.runName}".toString(), '@type': 'CreateAction',
        name: "perturbdiff ${workflow.runName}".toString(), description: workflow.commandLine,
        startTime: timeOf(workflow.start), endTime: timeOf(workflow.complete),
        actionStatus: "http://schema.org/${workflow.success ? 'Completed' : 'Failed'}ActionStatus".toString(),
        instrument: linkOf(main), object: values.collect { one -> linkOf(one) },
        result: results.collect { one -> linkOf(one) }]
    def root = ['@id': './', '@type': 'Dataset', name: params.title ?: 'Perturbation predictions',
        description: 'Results of a run of perturbdiff', datePublished: timeOf(workflow.complete),
        license: 'The terms of the data that went in hold for what came out.',
        conformsTo: profiles().collect { id -> ['@id': id] }, mainEntity: linkOf(main), mentions: linkOf(action),
        hasPart: ([main] + results + records).collect { one -> linkOf(one) }]
    def head = ['@id': 'ro-crate-metadata.json', '@type': 'CreativeWork', about: linkOf(root),
        conformsTo: ['https://w3id.org/ro/crate/1.1', profiles()[2]].collect { id -> ['@id': id] }]
    def known = profiles().collect { id -> ['@id': id, '@type': 'CreativeWork', name: id, version: id.split('/')[-1]] }
    return [head, root, main, language, action] + known + results + records + values +
        values.collect { one -> formalOf(one) }
}

// a file of that name that another program made stays
def writeCrate() {
    def outdir = file(params.outdir, glob: false).toAbsolutePath()
    def place  = outdir.resolve('ro-crate-metadata.json')
    if (place.exists() && !place.text.contains('"pipeline_info/main.nf"')) {
        log.warn "perturbdiff: ${place} is not of this workflow: the run is not described there"
        return
    }
    def info = outdir.resolve('pipeline_info')
    info.resolve('main.nf').text = file("${projectDir}/main.nf").text
    def names   = ["run_${params.report_stamp}.json", 'versions.yml', 'design.csv']
    def records = names.collect { name -> info.resolve(name) }.findAll { path -> path.exists() }
        .collect { path -> partOf(path, outdir) }
    def crate = ['@context': 'https://w3id.org/ro/crate/1.1/context',
        '@graph': entitiesOf(resultsIn(outdir), records, valuesOf())]
    place.text = groovy.json.JsonOutput.prettyPrint(groovy.json.JsonOutput.toJson(crate)) + '\n'
}
