// The samplesheet: rows read and checked before any task starts; all errors in one message.

include { comparisonProblems                                        } from './comparison'
include { datasetProblems; isDataset; isSimulated; locate; tablesOf } from './inputs'
include { expand; fileSettings; overlay; parseOverrides             } from './recipes'
include { readPreset; settingOf                                     } from './recipes'
include { filesIn; isStore; optionsOf                               } from './inputs'
include { isFitted; isMaker                                         } from './models'
include { lackProblems; listedIn                                    } from './genes'
include { makerProblems                                             } from './maker_problems'
include { optionProblems                                            } from './tools'
include { pathProblems; shown                                       } from './characters'
include { sampleProblems                                            } from './sampling'

// columns with a gene list: a file, or the id of a vocabulary row
def geneColumns() {
    return ['genes', 'model_genes', 'score_genes']
}

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
    if (!row.dataset && row.mode && !isMaker(row.mode)) { problems << "'dataset' is empty" }
    return problems + rowOptionProblems(row, rules.properties.options['x-options'])
}

// options: mode → name → what a value looks like; `file`, or `switch`, which has none
def rowOptionProblems(row, options) {
    def known = options[row.mode] ?: [:]
    return optionsOf(row).collectMany { name, value ->
        def rule = known[name]
        if (!rule) {
            def names = known ? "options: ${known.keySet().join(', ')}" : 'they have none'
            return ["rows of mode ${row.mode} have no option '${name}'; ${names}"]
        }
        if (rule == 'switch') { return value == true ? [] : ["option '${name}' takes no value"] }
        return value != true && (rule == 'file' || value ==~ rule) ? [] :
            ["option '${name}${value == true ? '' : "=${value}"}' does not fit ${rule}"]
    }
}

// names that a task would not be given as they are; every cell that becomes one
def nameProblems(row, contained) {
    def inputs = (row.input ?: '').split(/[|;]/).collect { name -> name.trim() }
        .findAll { name -> !isSimulated(name) && !isDataset(name) }
    def single = ['init', 'split', 'script', 'conditions', 'targets'] + geneColumns()
    def cells  = row.findAll { name, value -> value && name in single }.collect { name, value -> [name, value] } +
        ['obs', 'add'].collectMany { name ->
            (row[name] ?: '').split(/[|;]/).collect { one -> one.trim() }.findAll().collect { one -> [name, one] }
        } + optionsOf(row).findAll { _name, value -> value != true }
            .collect { name, value -> ["option ${name}", value] } +
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

// a file is missing that is no row either
def missingThing(text, rows, modes, folder, what) {
    return rows.any { row -> row.id == text && row.mode in modes } ? [] : missingFile(text, folder, what)
}

// of an embed row: a path that is not there; other words are names of models
def modelProblems(row, folder) {
    def model = "${optionsOf(row).model ?: ''}".toString()
    return row.mode == 'embed' && model =~ '^[./~]' ? missingFile(model, folder, 'model') : []
}

// what all rows may name
def namedProblems(row, rows, folder) {
    def tables = tablesOf(row).values()
    return filesIn((row.input ?: '').replace('|', ';')).collectMany { name -> missingFile(name, folder, 'input') } +
        geneColumns().collectMany { name -> missingThing(row[name], rows, ['vocabulary'], folder, 'gene list') } +
        filesIn(row.add).collectMany { name -> missingThing(name, rows, ['vocabulary'], folder, 'gene list') } +
        tables.collectMany { name -> missingThing(name, rows, ['embed'], folder, 'semantic table') } +
        filesIn((row.obs ?: '').replace('|', ';'))
            .collectMany { name -> missingFile(name, folder, 'table of cell labels') } +
        missingFile(row.split, folder, 'split') + missingFile(row.targets, folder, 'table of target genes') +
        missingFile(row.conditions, folder, 'table of conditions') + modelProblems(row, folder)
}

// which columns go with which modes and inputs
def columnProblems(row, stores, folder) {
    def problems = []
    if (row.add) { problems << "'add' is for vocabulary rows" }
    if (row.embeddings && !isFitted(row.mode) && !(row.mode in ['sample', 'kernel-ridge'])) {
        problems << "'embeddings' is for train, pretrain, finetune, sample, kernel-ridge and import rows"
    }
    if (row.mode == 'kernel-ridge' && !tablesOf(row).perturbation) {
        problems << "'embeddings' names no vectors of perturbations: perturbation=FILE"
    }
    if (row.model_genes && !(row.mode in ['train', 'pretrain'])) {
        problems << "'model_genes' is for train and pretrain rows"
    }
    if (row.mode == 'pretrain') {
        problems += ['score_genes', 'targets'].findAll { name -> row[name] }
            .collect { name -> "'${name}' is for rows that are scored, which a pretrain row is not" }
    }
    def ready = stores.flatten().findAll { name -> !isSimulated(name) && !isDataset(name) }
        .collect { name -> locate(name, folder) }.findAll { path -> isStore(path) }
    if (ready) {
        problems += ['genes', 'obs'].findAll { name -> row[name] && stores.size() == 1 }.collect { name ->
            "'${name}' is for raw counts, and ${ready[0].name} is a store" +
                (name == 'genes' ? ': name the genes of the model in model_genes' : '')
        }
        if (stores.any { names -> names.size() > 1 && names.any { name -> locate(name, folder) in ready } }) {
            problems << 'a store cannot be joined with other inputs'
        }
        def same = ready.countBy { path -> path.name }.findAll { _name, count -> count > 1 }.keySet()
        problems += same.collect { name -> "two of its stores are named '${name}': rename one" }
    }
    return problems
}

// what is scored and the model lacks, where both lists can be read here
def scoredProblems(row, rows, folder) {
    if (!row.score_genes || row.mode in ['control', 'pretrain']) { return [] }
    def read  = { text -> text ? listedIn(locate(text, folder)) : null }
    def prior = row.mode == 'finetune' && row.transfer != 'new-genes' || row.mode == 'sample'
    def first = prior ? rows.find { other -> other.id == row.init } : null
    def owner = first ?: row
    def text  = prior && !first ? row.init : owner.model_genes ?: owner.genes
    return lackProblems(read.call(row.score_genes), read.call(text), ["score_genes ${row.score_genes}", text]) +
        lackProblems(read.call(row.score_genes), read.call(row.genes), ["score_genes ${row.score_genes}", row.genes])
}

def fileProblems(row, rows, folder) {
    def stores   = (row.input ?: '').split(/\|/).collect { part -> filesIn(part) }
    def problems = namedProblems(row, rows, folder) + columnProblems(row, stores, folder)
    if (stores.any { names -> names.size() > 1 && names.any { name -> isSimulated(name) } }) {
        problems << "'simulate:' cannot be joined with other inputs"
    }
    if (stores.size() != (row.dataset ?: '').split(/\|/).size()) {
        problems << "'dataset' and 'input' name different numbers of data sets"
    }
    if (stores.size() > 1 && row.mode != 'pretrain') { problems << "only a pretrain row can have several data sets" }
    def tables = (row.obs ?: '').split(/\|/, -1)
    if (row.obs && tables.size() != stores.size()) {
        problems << "'obs' and 'input' name different numbers of data sets"
    } else if (row.obs && [tables, stores].transpose().any { text, names ->
        filesIn(text).size() > 1 && filesIn(text).size() != names.size() }) {
        problems << "'obs' names several tables, but not one for each input"
    }
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

// a file that a setting names is staged, or has a column of its own
def settingFileProblems(settings, folder, contained) {
    return fileSettings().collectMany { name, column ->
        def value = settingOf(settings, name)
        if (!value) { return [] }
        if (column) { return ["${name}: name '${value}' in the column ${column}"] }
        return missingFile(value, folder, "file of ${name}") + pathProblems(name, value, contained)
    }
}

def recipeProblems(row, folder, contained) {
    def problems = []
    def settings = [:]
    def each     = []
    try {
        settings = row.preset ? readPreset(row.preset, folder) : [:]
    } catch (Exception problem) {
        problems << reasonOf(problem)
    }
    problems += prefixProblems(row)
    try {
        each     = (row.dataset ?: '').split(/\|/)
            .collect { dataset -> overlay(settings, expand(parseOverrides(row.overrides, dataset))) }
        settings = each.inject(settings) { tree, one -> overlay(tree, one) }
    } catch (Exception problem) {
        problems << reasonOf(problem)
    }
    problems += each.collectMany { one -> settingFileProblems(one, folder, contained) }.unique()
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
    def known = rows.findAll { other -> other.mode in ['pretrain', 'import'] }.collect { other -> other.id }
    if (row.init in known || locate("${row.init}/manifest.json", folder).exists()) { return [] }
    return ["unknown init '${row.init}'; pretrain and import rows: ${known.join(', ') ?: 'none'}"]
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
            def problems = formProblems(row, schema) + nameProblems(row, contained)
            if (isMaker(row.mode)) {
                problems += namedProblems(row, rows, folder) + makerProblems(row, rows) +
                    recipeProblems(row, folder, contained)
            } else {
                problems += fileProblems(row, rows, folder) + scriptProblems(row, folder) +
                    recipeProblems(row, folder, contained) + initProblems(row, rows, folder) +
                    sampleProblems(row, rows, folder) + comparisonProblems(row) + scoredProblems(row, rows, folder)
            }
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
