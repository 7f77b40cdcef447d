// Mistakes in rows of mode `sample`.

include { locate                                                } from './inputs'
include { isBound; isFitted; sourceOf; stepFolder               } from './models'
include { expand; overlay; parseOverrides; presetOf; readPreset } from './recipes'

def stepProblems(row, source, folder) {
    def step = row.step as int
    if (!step) { return [] }
    def train = overlay(readPreset(presetOf(source), folder), expand(parseOverrides(source.overrides))).train ?: [:]
    def every = train.keep_every
    if (!every) { return ["'${source.id}' keeps no steps: set train.keep_every there, so that it divides ${step}"] }
    if (step % every) { return ["'${source.id}' does not keep step ${step}: its train.keep_every is ${every}"] }
    return train.max_steps && step > train.max_steps ?
        ["'${source.id}' has no step ${step}: its train.max_steps is ${train.max_steps}"] : []
}

def scopeProblems(row, bound) {
    def allowed = ['sample', 'evaluate'] + (bound ? [] : ['data', 'split', 'simulate'])
    def touched = parseOverrides(row.overrides, row.dataset).keySet() + parseOverrides(row.overrides).keySet()
    return touched.findAll { section -> !(section in allowed) }
        .collect { section ->
            "a sample row cannot change '${section}'; its overrides may touch ${allowed.join(', ')}".toString()
        }
}

// what a row says of the data although the row that it samples says it already
def repeatProblems(row, source) {
    def other = { name -> (row[name] ?: '') != (source[name] ?: '') }
    def unlike = ['dataset', 'input'].findAll { name -> other.call(name) }
    return unlike.collect { name -> "${name} '${row[name]}' is not that of '${source.id}', '${source[name]}'" } +
        ['preset', 'split', 'genes', 'obs', 'score_genes', 'targets'].findAll { name -> row[name] && other.call(name) }
            .collect { name -> "'${name}' is that of '${source.id}': leave it empty" }
}

def bundleProblems(row, folder) {
    if (!locate("${row.init}/config.json", folder).exists()) {
        return ["'${row.init}' is neither a row nor a bundle folder"]
    }
    def within = row.step && row.step as int ? "${row.init}/${stepFolder(row.step as int)}" : row.init
    return locate("${within}/config.json", folder).exists() ? [] : ["'${row.init}' has no step ${row.step}"]
}

// columns that are fine by themselves but not in this row
def sampleProblems(row, rows, folder) {
    if (row.mode != 'sample') {
        return ['step', 'conditions'].findAll { name -> row[name] }.collect { name -> "'${name}' is for sample rows" }
    }
    if (!row.init) { return ["'init' is empty: name a train, finetune or pretrain row, or a bundle folder"] }
    if (row.step && !(row.step ==~ /\d{1,7}/)) { return [] }   // told already
    def source = sourceOf(row, rows)
    def known  = rows.findAll { other -> isFitted(other.mode) || other.mode == 'import' }
        .collect { other -> other.id }
    if (!source && !(row.init in known) && bundleProblems(row, folder)) {
        return bundleProblems(row, folder)
            .collect { problem -> "unknown init: ${problem}; rows with a model: ${known.join(', ') ?: 'none'}" }
    }
    try {
        def bound = isBound(row, rows)
        return scopeProblems(row, bound) + (bound ? repeatProblems(row, source) : []) +
            (source && row.step ? stepProblems(row, source, folder) : [])
    } catch (Exception _problem) {
        return []   // of the recipes, and told there
    }
}
