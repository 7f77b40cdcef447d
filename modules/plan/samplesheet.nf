// The samplesheet: rows read and checked before any task starts; all errors in one message.

include { comparisonProblems                                        } from './comparison'
include { datasetProblems; isDataset; isSimulated; locate; tablesOf } from './inputs'
include { expand; overlay; parseOverrides; readPreset               } from './recipes'
include { isFitted                                                  } from './models'
include { optionProblems                                            } from './tools'
include { pathProblems; shown                                       } from './characters'
include { sampleProblems                                            } from './sampling'

def missingFile(text, folder, what) {
    if (what == 'input' && isDataset(text)) { return datasetProblems(text) }
    return text && !isSimulated(text) && !locate(text, folder).exists() ? ["no such ${what} '${text}'"] : []
}

def formProblems(row, schema) {
    def rules = schema.items
    def problems = rules.required.findAll { name -> !row[name] }.collect { name -> "'${name}' is empty" }
    rules.properties.findAll { name, _rule -> row[name] }.each { name, rule ->
        if (rule['enum'] && !(row[name] in rule['enum'])) {
            problems << "unknown ${name} '${row[name]}'; one of ${rule['enum'].join(', ')}"
        }
        if (rule.pattern && !(row[name] ==~ rule.pattern)) {
            problems << "${name} '${row[name]}' does not fit ${rule.pattern}"
        }
        else if (rule['x-maximum'] && (row[name] as BigInteger) > rule['x-maximum']) {
            problems << "${name} ${row[name]} is too large; at most ${rule['x-maximum']}"
        }
    }
    return problems
}

// names that a task would not be given as they are; every cell that becomes one
def nameProblems(row, contained) {
    def inputs = (row.input ?: '').split(/[|;]/).collect { name -> name.trim() }
        .findAll { name -> !isSimulated(name) && !isDataset(name) }
    def cells  = row.findAll { name, value -> value && name in ['init', 'split', 'genes', 'obs', 'script'] }
        .collect { name, value -> [name, value] } +
        inputs.collect { name -> ['input', name] } + tablesOf(row).values().collect { name -> ['embeddings', name] }
    def broken = row.findAll { _name, value -> value && value =~ /\p{Cntrl}/ }.keySet()
    def marked = broken.collect { name ->
        "${name} '${row[name]}' has a line break or another control character: take it out"
    }
    return marked +
        cells.findAll { name, _value -> !(name in broken) }
            .collectMany { name, value -> pathProblems(name, value, contained) }
}

def scriptProblems(row, folder) {
    def problems = ['script', 'python'].findAll { name -> row[name] && row.mode != 'script' }
        .collect { name -> "'${name}' is for rows of mode script" }
    if (row.mode == 'script' && !row.script) {
        problems << "'script' is empty: name the file that predicts (docs/adapters.md)"
    }
    return problems + missingFile(row.script, folder, 'script')
}

def fileProblems(row, folder) {
    def stores   = (row.input ?: '').split(/\|/)
        .collect { part -> part.split(';').collect { name -> name.trim() }.findAll() }
    def problems = stores.flatten().collectMany { name -> missingFile(name, folder, 'input') }
    problems += missingFile(row.split, folder, 'split') + missingFile(row.genes, folder, 'gene list') +
        missingFile(row.obs, folder, 'table of cell labels')
    problems += tablesOf(row).values().collectMany { name -> missingFile(name, folder, 'semantic table') }
    if (row.embeddings && !isFitted(row.mode)) {
        problems << "'embeddings' is for train, pretrain and finetune rows"
    }
    if (stores.any { names -> names.size() > 1 && names.any { name -> isSimulated(name) } }) {
        problems << "'simulate:' cannot be joined with other inputs"
    }
    if (stores.size() != (row.dataset ?: '').split(/\|/).size()) {
        problems << "'dataset' and 'input' name different numbers of data sets"
    }
    if (stores.size() > 1 && row.mode != 'pretrain') { problems << "only a pretrain row can have several data sets" }
    if (stores.size() > 1 && row.obs) { problems << "'obs' is for rows with one data set" }
    return problems
}

// assets/recipe_keys.txt lists the keys of the configuration; a test keeps it so
def unknownKeys(settings) {
    def known = file("${projectDir}/assets/recipe_keys.txt").readLines()
    def used  = settings.collectMany { section, values ->
        values instanceof Map ? values.keySet().collect { key -> "${section}.${key}".toString() } : [section]
    }
    return used.findAll { key -> !(key in known) }.collect { key ->
        def close = known.closest(key)
        "unknown recipe key '${key}'${close ? ", did you mean '${close[0]}'?" : ''}"
    }
}

def reasonOf(problem) {
    // a call into another script wraps what it throws
    return problem.cause ? reasonOf(problem.cause) : problem.message
}

def recipeProblems(row, folder) {
    def problems = []
    def settings = [:]
    try {
        settings = row.preset ? readPreset(row.preset, folder) : [:]
    } catch (Exception problem) {
        problems << reasonOf(problem)
    }
    problems += prefixProblems(row)
    try {
        settings = (row.dataset ?: '').split(/\|/)
            .inject(settings) { tree, dataset -> overlay(tree, expand(parseOverrides(row.overrides, dataset))) }
    } catch (Exception problem) {
        problems << reasonOf(problem)
    }
    problems += unknownKeys(settings) + optionProblems(row.mode, settings.baseline?.options)
    if (settings.data?.hvg_cells == 'train') {
        if (row.mode == 'pretrain') { problems << "data.hvg_cells=train needs a split, which a pretrain row has not" }
        if ((row.input ?: '').contains(';')) { problems << "data.hvg_cells=train needs a single input file" }
        if (settings.split?.choose == 'pca' && !row.split) {
            problems << 'split.choose=pca needs the store before the split, ' +
                'data.hvg_cells=train the split before the store'
        }
    }
    return problems
}

// an override with a data set's name before it: a name of the row, and a section of its data, not of the network
def prefixProblems(row) {
    def known = (row.dataset ?: '').split(/\|/) as List
    def found = (row.overrides ?: '').split(';')
        .collect { part -> part.trim() =~ /^([\w.-]+):(\w+)\./ }.findAll { match -> match.find() }
    return found.collectMany { match ->
        def (name, section) = match[0].drop(1)
        if (!(name in known)) { return ["override for the data set '${name}'; this row's: ${known.join(', ')}"] }
        if (!(section in ['model', 'schedule', 'loss', 'train'])) { return [] }
        return ["override '${name}:${section}…': ${section} is of the network, not of a data set; leave '${name}:' out"]
    }
}

def initProblems(row, rows, folder) {
    if (row.mode == 'sample') { return [] }   // told by sampleProblems
    if (row.mode != 'finetune') { return row.init ? ["'init' is for finetune and sample rows"] : [] }
    if (!row.init) { return ["'init' is empty: name a pretrain row or a bundle folder"] }
    def known = rows.findAll { other -> other.mode == 'pretrain' }.collect { other -> other.id }
    if (row.init in known || locate("${row.init}/manifest.json", folder).exists()) { return [] }
    return ["unknown init '${row.init}'; pretrain rows: ${known.join(', ') ?: 'none'}"]
}

// contained: whether tasks run in containers
def readRows(sheet, schemaFile, contained = false) {
    def schema = new groovy.json.JsonSlurper().parseText(schemaFile.text)
    def rows   = sheet.splitCsv(header: true, strip: true, quote: '"')
    if (!rows) { error("samplesheet ${sheet.name}: no rows") }
    def columns = schema.items.properties.keySet()
    def errors  = rows[0].keySet().findAll { name -> !(name in columns) }
        .collect { name -> "unknown column '${name}'; columns: ${columns.join(', ')}".toString() }
    errors += schema.items.required.findAll { name -> !rows[0].containsKey(name) }
        .collect { name -> "column '${name}' is missing".toString() }
    if (!errors) {
        rows.eachWithIndex { row, i ->
            def folder   = sheet.parent
            def problems = formProblems(row, schema) + nameProblems(row, contained) + fileProblems(row, folder) +
                scriptProblems(row, folder) + recipeProblems(row, folder) + initProblems(row, rows, folder) +
                sampleProblems(row, rows, folder) + comparisonProblems(row)
            if (rows.take(i).any { other -> other.id == row.id }) { problems << "duplicate id '${row.id}'" }
            def names    = schema.items.properties.mode['enum'] + ['ceiling', 'real']
            if (row.id in names && row.id != row.mode) { problems << "id '${row.id}' is the name of a method" }
            errors += problems.collect { problem -> "line ${i + 2} (${row.id ?: 'no id'}): ${problem}".toString() }
        }
    }
    if (errors) {
        error("samplesheet ${shown(sheet.name)}:\n  " + errors.collect { problem -> shown(problem) }.join('\n  '))
    }
    return rows
}
