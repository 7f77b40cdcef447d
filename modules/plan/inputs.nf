// Where the inputs that a row names are: relative to the sheet, else to the launch folder; of a registered data set
// (dataset:NAME) in --fetch_dir, where FETCH puts what is nowhere, in the folder PERTURBDIFF_DATA, or in the user's
// cache, as perturbdiff/datasets/registry.py looks.

def isDataset(text) {
    return text.startsWith('dataset:')
}

// read once for all rows: the properties of the JVM live as long as the run
def registeredDatasets() {
    return System.properties.computeIfAbsent('perturbdiff.datasets') { _name ->
        new groovy.yaml.YamlSlurper().parseText(file("${projectDir}/perturbdiff/datasets/registry.yaml").text)
    }
}

// the data set of an input that the paper counts, or null
def countedBy(sources) {
    def name = sources.size() == 1 && isDataset(sources[0]) ? sources[0] - 'dataset:' : null
    return name && registeredDatasets()[name]?.paper ? name : null
}

// names of its files; {part} or {part:02d} stands for the number of a part
def namesOf(entry) {
    if (!entry.parts) { return [entry.file] }
    def digits = (entry.file =~ /\{part(?::0(\d+)d)?\}/)[0]
    return (entry.parts[0]..entry.parts[1]).collect { number ->
        entry.file.replace(digits[0], "${number}".padLeft((digits[1] ?: '0') as int, '0'))
    }
}

def fetchFolder() {
    return params.fetch_dir ? file(params.fetch_dir, glob: false).toAbsolutePath() : null
}

def foldersOf() {
    def cache = System.getenv('XDG_CACHE_HOME') ?: "${System.getenv('HOME')}/.cache"
    return [fetchFolder(), System.getenv('PERTURBDIFF_DATA'), "${cache}/perturbdiff/datasets"].findAll()
}

def filesAt(entry, folder) {
    return namesOf(entry).collect { name -> file("${folder}/${name}", glob: false) }
}

// the files of a registered data set where all of them are, else where they will be
def datasetFiles(text) {
    def entry = registeredDatasets()[text - 'dataset:']
    def whole = foldersOf().find { folder -> filesAt(entry, folder).every { path -> path.exists() } }
    return filesAt(entry, whole ?: foldersOf()[0])
}

// what FETCH has to bring, or null
def fetchOf(text) {
    return isDataset(text) && !datasetFiles(text).every { path -> path.exists() } ? text - 'dataset:' : null
}

def datasetProblems(text) {
    def known = registeredDatasets()
    def name  = text - 'dataset:'
    if (!known[name]) {
        def close = known.keySet().closest(name)
        return ["unknown data set '${name}'${close ? ", did you mean '${close[0]}'?" : ''}; " +
            "data sets: ${known.keySet().join(', ')}"]
    }
    if (known[name].file.contains('/')) {
        return ["data set '${name}' is a folder of several data sets: " +
            "name the folder ${known[name].file.split('/')[0]} " +
            'that perturbdiff data get makes of them (docs/inputs.md)']
    }
    if (!fetchOf(text) || fetchFolder()) { return [] }
    def missing = datasetFiles(text).find { path -> !path.exists() }
    return ["data set '${name}': no ${missing.name} in ${foldersOf().join(' or ')}; " +
        "fetch it by --fetch_dir FOLDER or perturbdiff data get ${name}, " +
        'or put it into a folder and name that in PERTURBDIFF_DATA']
}

def locate(text, folder) {
    if (isDataset(text)) { return datasetFiles(text)[0] }
    if (text.startsWith('/') || text.contains('://')) { return file(text, glob: false) }
    def beside = file("${folder}/${text}", glob: false)
    return beside.exists() ? beside : file(text, glob: false)
}

// names joined by ;
def filesIn(text) {
    return (text ?: '').split(';').collect { name -> name.trim() }.findAll()
}

// all files of an input
def locateAll(text, folder) {
    return isDataset(text) ? datasetFiles(text) : [locate(text, folder)]
}

// a store that `preprocess` made is used as it is
def isStore(path) {
    return path.resolve('conditions.parquet').exists() && path.resolve('manifest.json').exists()
}

// What a cell names: what a row of these modes makes, or a file. `key`: where the workflow finds it ('': there is
// none); `mark`: what determines it, as far as it is known before it is made
def markOf(text, rows, modes, folder) {
    if (!text) { return [key: '', mark: '', file: []] }
    def maker = rows.find { row -> row.id == text && row.mode in modes }
    if (!maker) {
        def path = locate(text, folder)
        return [key: "file ${path}".toString(), mark: text, file: path]
    }
    def added = filesIn(maker.add).collect { name -> rows.find { row -> row.id == name && row.mode in modes } }
        .findAll()
    def cells = ([maker] + added).collectMany { row ->
        ['id', 'input', 'preset', 'overrides', 'add', 'options'].collect { name -> row[name] ?: '' }
    }
    return [key: "made ${text}".toString(), mark: cells.join('|'), file: null]
}

// NAME=VALUE joined by ;, a name alone is a switch
def optionsOf(row) {
    return filesIn(row.options).collectEntries { part ->
        def words = part.split('=', 2).collect { word -> word.trim() }
        [(words[0]): words.size() == 2 ? words[1] : true]
    }
}

// semantic tables of a row, KIND=FILE;…: kind → text of the path
def tablesOf(row) {
    return (row.embeddings ?: '').split(';').findAll { part -> part.contains('=') }
        .collectEntries { part -> [(part.split('=', 2)[0].trim()): part.split('=', 2)[1].trim()] }
}

def isSimulated(text) {
    return text.startsWith('simulate:')
}
