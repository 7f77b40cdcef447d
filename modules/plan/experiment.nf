// From rows to work: which stores, splits and runs the sheet asks for, each once.
// A store or split is named DATASET-KEY, the key a digest of everything that determines it.

include { collectionOf; designOf                                                } from './comparison'
include { expectedOf                                                            } from './expected'
include { isSimulated; locate; tablesOf                                         } from './inputs'
include { inherit; isBound; isModel; sourceOf; stepFolder                        } from './models'
include { digest; expand; overlay; parseOverrides; presetOf; readPreset; recipe } from './recipes'
include { kindOf                                                                } from './tools'

def settingsOf(row, dataset, folder) {
    return overlay(readPreset(presetOf(row), folder), expand(parseOverrides(row.overrides, dataset)))
}

def simulationOf(source, settings, folder, seed) {
    def name = source - 'simulate:'
    def text = recipe(overlay(readPreset(name, folder), [simulate: settings.simulate ?: [:]]), ['simulate'])
    return [id: "simulated-${digest([text, seed])}".toString(), recipe: text, seed: seed]
}

// what PREPROCESS does for data set number i of a row, before it is known whether a split takes part
def storeOf(row, i, folder, seed) {
    def dataset  = row.dataset.split(/\|/)[i]
    def settings = settingsOf(row, dataset, folder)
    def sources  = row.input.split(/\|/)[i].split(';').collect { name -> name.trim() }.findAll()
    def drawn    = isSimulated(sources[0]) ? simulationOf(sources[0], settings, folder, seed) : null
    def inputs   = drawn ? [] : sources.collect { name -> locate(name, folder) }
    def text     = recipe(settings, ['data'])
    def key      = digest([dataset, drawn ? drawn.id : inputs.join(';'), text, row.genes ?: '', seed] +
        [row.obs].findAll())
    return [id: "${dataset}-${key}".toString(), dataset: dataset, key: key, simulation: drawn, inputs: inputs,
            obs: row.obs ? locate(row.obs, folder) : [],
            genes: row.genes ? locate(row.genes, folder) : [], recipe: text, split: null, seed: seed]
}

// a store with its split and the part that is predicted: what runs share that may be compared
def unitOf(row, folder, seed) {
    def settings   = settingsOf(row, row.dataset, folder)
    def store      = storeOf(row, 0, folder, seed)
    def toml       = row.split ? locate(row.split, folder) : []
    // a TOML of several data sets is read by this name
    def text       = recipe(settings + [name: row.dataset], ['name', 'data', 'split'])
    def splitFirst = settings.data?.hvg_cells == 'train'
    def key        = digest([store.key, text, toml ? "toml ${toml.text}" : '', splitFirst])
    def split      = [id: "${row.dataset}-${key}".toString(), recipe: text, toml: toml, seed: seed,
                      store: splitFirst ? null : store.id, simulation: store.simulation, inputs: store.inputs,
                      obs: store.obs]
    if (splitFirst) { store = store + [id: "${row.dataset}-${digest([store.key, key])}".toString(), split: split.id] }
    def part = row.part ?: 'test'
    def id   = part == 'test' ? split.id : "${split.id}.${part}".toString()
    return [id: id, dataset: row.dataset, store: store, split: split, part: part]
}

def fitOf(row, unit, stores, folder, checkpoints) {
    def settings = settingsOf(row, '', folder)
    // the preset's (or variant's) own sampling goes along: validation samples, and the bundle keeps it; a row's changes
    // to it do not, so that they sample again without training again
    def variant  = parseOverrides(row.overrides).subMap(['variant'])
    def sampling = overlay(readPreset(presetOf(row), folder), expand(variant)).sample ?: [:]
    def text     = recipe([name: presetOf(row)] + settings + [sample: sampling],
        ['name', 'model', 'schedule', 'loss', 'train', 'sample'])
    def parts    = [
        row.id, unit ? unit.split.id : '', stores.collect { store -> store.id }.join(';'), text, row.seed ?: 0,
        row.init ?: '', row.transfer ?: '', row.embeddings ?: '',
    ]
    // TRAIN adds a digest of its inputs to the name
    return [recipe: text, checkpoints: "${checkpoints}/${row.id}-${digest(parts)}".toString()]
}

// `sample` of a bundle's recipe, JSON
def bundleSampling(row, folder) {
    def within = row.step && row.step as int ? "${row.init}/${stepFolder(row.step as int)}" : row.init
    return new groovy.json.JsonSlurper().parseText(locate("${within}/config.json", folder).text).config?.sample ?: [:]
}

// how a row samples where that is not in its own recipe: as the prior or the bundle was meant to be, with the
// row's changes
def borrowedSampling(row, rows, folder) {
    def source = sourceOf(row, rows)
    def base   = source ? settingsOf(source, '', folder).sample ?: [:] : bundleSampling(row, folder)
    return overlay(base, parseOverrides(row.overrides, row.dataset).sample ?: [:])
}

def runOf(given, rows, folder, options) {
    def row      = inherit(given, rows)
    def seed     = options.seed
    def pretrain = row.mode == 'pretrain'
    def unit     = pretrain ? null : unitOf(row, folder, seed)
    def count    = row.dataset.split(/\|/).size()
    def stores   = pretrain ? (0..<count).collect { i -> storeOf(row, i, folder, seed) } : [unit.store]
    def settings = settingsOf(row, row.dataset, folder)
    def folderOf = row.init ? locate(row.init, folder) : null
    def borrows  = row.mode == 'sample' && !isBound(row, rows)
    def sampling = borrows ? [sample: borrowedSampling(row, rows, folder)] : settings
    def scoring  = [evaluate: (settings.evaluate ?: [:]) + options.evaluation]
    def isFolder = folderOf && folderOf.exists() && !rows.any { other -> other.id == row.init }
    def run      = [
        id: row.id, mode: row.mode, seed: (row.seed ?: '0') as Long, unit: unit, stores: stores,
        init: row.init ?: null, bundle: isFolder ? folderOf : null, transfer: row.transfer ?: 'keep',
        step: row.step ? row.step as Integer : null,
        arm: row.arm ?: '', level: row.level ?: '', collection: row.collection ?: '',
        kinds: tablesOf(row).keySet() as List,
        tables: tablesOf(row).values().collect { name -> locate(name, folder) },
        script: row.mode == 'script' ? locate(row.script, folder) : [], python: row.python ?: '',
        baseline: recipe(settings, ['baseline']),
        usual: recipe(readPreset(presetOf(row), folder), ['baseline']),
        sample: recipe(sampling, ['sample']), evaluate: recipe(scoring, ['evaluate']),
    ]
    return run + fitOf(row, unit, stores, folder, options.checkpoints)
}

// baselines of every unit: those that rows ask for, and the parameter's where no row does; these are scored as the
// unit's first run is, and have the settings of its recipe but not of its overrides
def baselinesOf(runs, names, seed) {
    def asked = runs.findAll { run -> run.unit && !isModel(run.mode) }
        .collect { run ->
            run.subMap(['unit', 'seed', 'script', 'python', 'evaluate', 'arm', 'level']) +
                [name: run.mode, method: run.id, recipe: run.baseline]
        }
    def taken = asked.collect { one -> [one.unit.id, one.name] }
    def unasked = runs.findAll { run -> run.unit }.unique { run -> run.unit.id }.collectMany { run ->
        names.findAll { name -> !([run.unit.id, name] in taken) }.collect { name ->
            run.subMap(['unit', 'evaluate']) +
                [seed: seed, script: [], python: '', name: name, method: name, recipe: run.usual]
        }
    }
    return (asked + unasked).collect { one ->
        one + [id: "${one.unit.id}.${one.method}".toString(), kind: kindOf(one.name)]
    }
}

// two splits or selections of one data set must not be taken for the same in the tables
def nameOf(unit, units) {
    def splits = units.findAll { other -> other.dataset == unit.dataset }.collect { other -> other.split.id }.unique()
    return splits.size() > 1 ? unit.split.id : unit.dataset
}

// nor what was chosen by with what was not
def labelOf(unit, units) {
    return unit.part == 'test' ? nameOf(unit, units) : "${nameOf(unit, units)}.${unit.part}".toString()
}

// a finetuning run starts anew when its pretraining changes
def afterInit(run, runs) {
    def init = runs.find { other -> other.id == run.init && other.mode == 'pretrain' }
    return init ? run + [checkpoints: "${run.checkpoints}-${digest([init.checkpoints])}".toString()] : run
}

def planOf(rows, folder, options) {
    def drafts = rows.collect { row -> runOf(row, rows, folder, options) }
    def runs   = drafts.collect { run -> afterInit(run, drafts) }
    def units  = runs.findAll { run -> run.unit }.collect { run -> run.unit }.unique { unit -> unit.id }
    def stores = runs.collectMany { run -> run.stores }.unique { store -> store.id }
    def first  = units.collectEntries { unit -> [(unit.id): runs.find { run -> run.unit && run.unit.id == unit.id }] }
    def labels = units.collectEntries { unit -> [(unit.id): labelOf(unit, units)] }
    def groups = units.collectEntries { unit -> [(unit.id): collectionOf(unit, runs, nameOf(unit, units))] }
    def models = runs.findAll { run -> isModel(run.mode) }
    def others = baselinesOf(runs, options.baselines, options.seed)
    def pairs  = units.unique(false) { unit -> unit.split.id }
        .collect { unit -> [id: unit.split.id, store: unit.store.id] }
    return [
        runs: runs, stores: stores, pairs: pairs, models: models,
        splits: units.collect { unit -> unit.split }.unique { split -> split.id },
        bare: stores.collect { store -> store.id } - pairs.collect { pair -> pair.store },   // stores without a split
        simulations: stores.findAll { store -> store.simulation }.collect { store -> store.simulation }
            .unique { drawn -> drawn.id },
        units: units.collect { unit ->
            [id: unit.id, pair: unit.split.id, part: unit.part, label: labels[unit.id],
                evaluate: first[unit.id].evaluate]
        },
        baselines: others.findAll { one -> one.kind == 'built-in' },
        externals: others.findAll { one -> one.kind != 'built-in' },
        expected: expectedOf(runs, others, labels), design: designOf(models, others, labels, groups),
    ]
}
