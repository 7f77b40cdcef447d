// From rows to work: which stores, splits and runs the sheet asks for, each once.
// A store or split is named DATASET-KEY, the key a digest of everything that determines it.

include { checksBefore; checksOf; paperOf                                       } from './checks'
include { collectionOf; designOf                                                } from './comparison'
include { expectedOf                                                            } from './expected'
include { countedBy; fetchFolder; fetchOf; filesIn; isDataset; isSimulated      } from './inputs'
include { isStore; locate; locateAll; markOf; optionsOf; tablesOf               } from './inputs'
include { inherit; isBound; isMaker; isModel; sourceOf; stepFolder               } from './models'
include { makersOf                                                              } from './makers'
include { digest; expand; overlay; parseOverrides; presetOf; readPreset; recipe } from './recipes'
include { settingOf; withStagedFiles                                            } from './recipes'
include { kindOf                                                                } from './tools'

def settingsOf(row, dataset, folder) {
    return overlay(readPreset(presetOf(row), folder), expand(parseOverrides(row.overrides, dataset)))
}

def simulationOf(source, settings, folder, seed) {
    def name = source - 'simulate:'
    def text = recipe(overlay(readPreset(name, folder), [simulate: settings.simulate ?: [:]]), ['simulate'])
    return [id: "simulated-${digest([text, seed])}".toString(), recipe: text, seed: seed]
}

// `data` of a recipe; where the genes are given, how they would be chosen does not matter: rows that differ in that
// alone share their store and their split
def dataOf(settings, row) {
    def choice = ['num_hvgs', 'hvg_flavor', 'hvg_by_batch']
    return [data: (withStagedFiles(settings).data ?: [:]).findAll { key, _value -> !row.genes || !(key in choice) }]
}

// what PREPROCESS does for data set number i of a row, before it is known whether a split takes part
def storeOf(row, i, rows, folder, seed) {
    def dataset  = row.dataset.split(/\|/)[i]
    def settings = settingsOf(row, dataset, folder)
    def sources  = filesIn(row.input.split(/\|/)[i])
    def drawn    = isSimulated(sources[0]) ? simulationOf(sources[0], settings, folder, seed) : null
    def inputs   = drawn ? [] : sources.collectMany { name -> locateAll(name, folder) }
    def ready    = inputs && isStore(inputs[0]) ? inputs[0] : null
    def text     = ready ? '{}' : recipe(dataOf(settings, row), ['data'])
    def genes    = markOf(ready ? '' : row.genes, rows, ['vocabulary'], folder)
    def tables   = (row.obs ?: '').split(/\|/, -1)[row.obs ? i : 0]
    def named    = ready ? '' : settingOf(settings, 'data.gene_aliases')
    def aliases  = named ? locate(named, folder) : []
    def key      = digest([dataset, drawn ? drawn.id : inputs.join(';'), text, genes.mark, ready ? 0 : seed] +
        [tables, aliases].findAll())
    return [id: "${dataset}-${key}".toString(), dataset: dataset, key: key, simulation: drawn, inputs: inputs,
            fetch: sources.collect { name -> fetchOf(name) }.findAll().unique(), ready: ready,
            published: sources.size() == 1 && isDataset(sources[0]), counted: countedBy(sources),
            obs: filesIn(tables).collect { name -> locate(name, folder) },
            aliases: aliases, genes: genes, recipe: text, split: null, seed: seed]
}

// a store with its split and the part that is predicted: what runs share that may be compared
def unitOf(row, rows, folder, seed) {
    def settings   = settingsOf(row, row.dataset, folder)
    def store      = storeOf(row, 0, rows, folder, seed)
    def toml       = row.split ? locate(row.split, folder) : []
    // a TOML of several data sets is read by this name
    def text       = recipe(settings + dataOf(settings, row) + [name: row.dataset], ['name', 'data', 'split'])
    def splitFirst = settings.data?.hvg_cells == 'train' && !store.ready
    def key        = digest([store.key, text, toml ? "toml ${toml.text}" : '', splitFirst])
    def split      = [id: "${row.dataset}-${key}".toString(), recipe: text, toml: toml, seed: seed,
                      store: splitFirst ? null : store.id, simulation: store.simulation, inputs: store.inputs,
                      obs: store.obs, fetch: store.fetch]
    if (splitFirst) { store = store + [id: "${row.dataset}-${digest([store.key, key])}".toString(), split: split.id] }
    def part    = row.part ?: 'test'
    def scored  = markOf(row.score_genes, rows, ['vocabulary'], folder)
    def targets = markOf(row.targets, [], [], folder)
    def marks   = [scored.mark, targets.mark].findAll()
    def id      = [split.id, part == 'test' ? '' : part, marks ? digest(marks) : ''].findAll().join('.')
    return [id: id, dataset: row.dataset, store: store, split: split, part: part, scored: scored, targets: targets]
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
    ] + [row.model_genes].findAll()
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
    def unit     = pretrain ? null : unitOf(row, rows, folder, seed)
    def count    = row.dataset.split(/\|/).size()
    def stores   = pretrain ? (0..<count).collect { i -> storeOf(row, i, rows, folder, seed) } : [unit.store]
    def settings = settingsOf(row, row.dataset, folder)
    def folderOf = row.init ? locate(row.init, folder) : null
    def imported = row.mode == 'sample' && rows.any { other -> other.id == row.init && other.mode == 'import' }
    def borrows  = row.mode == 'sample' && !imported && !isBound(row, rows)
    // an imported bundle's own sampling is known when it is there
    def changes  = imported ? parseOverrides(row.overrides, row.dataset).sample ?: [:] : [:]
    def sampling = borrows ? [sample: borrowedSampling(row, rows, folder)] : settings
    def scoring  = [evaluate: (settings.evaluate ?: [:]) + options.evaluation]
    def isFolder = folderOf && folderOf.exists() && !rows.any { other -> other.id == row.init }
    def run      = [
        id: row.id, mode: row.mode, seed: (row.seed ?: '0') as Long, unit: unit, stores: stores,
        init: row.init ?: null, bundle: isFolder ? folderOf : null, transfer: row.transfer ?: 'keep',
        step: row.step ? row.step as Integer : null,
        conditions: row.conditions ? locate(row.conditions, folder) : [],
        options: row.mode == 'sample' ? optionsOf(row) : [:],
        changes: changes.collect { name, value -> "sample.${name}=${groovy.json.JsonOutput.toJson(value)}".toString() },
        arm: row.arm ?: '', level: row.level ?: '', collection: row.collection ?: '',
        kinds: tablesOf(row).keySet() as List,
        tables: tablesOf(row).values().collect { name -> markOf(name, rows, ['embed'], folder) },
        genes: markOf(row.model_genes, rows, ['vocabulary'], folder),
        script: row.mode == 'script' ? locate(row.script, folder) : [], python: row.python ?: '',
        baseline: recipe(settings, ['baseline']),
        usual: recipe(readPreset(presetOf(row), folder), ['baseline']),
        sample: imported ? '' : recipe(sampling, ['sample']), evaluate: recipe(scoring, ['evaluate']),
    ]
    return run + fitOf(row, unit, stores, folder, options.checkpoints)
}

// baselines of every unit: those that rows ask for, and the parameter's where no row does; these are scored as the
// unit's first run is, and have the settings of its recipe but not of its overrides
def baselinesOf(runs, names, seed) {
    def asked = runs.findAll { run -> run.unit && !isModel(run.mode) }
        .collect { run ->
            run.subMap(['unit', 'seed', 'script', 'python', 'evaluate', 'arm', 'level', 'kinds', 'tables']) +
                [name: run.mode, method: run.id, recipe: run.baseline]
        }
    def taken = asked.collect { one -> [one.unit.id, one.name] }
    def judging = runs.findAll { run -> run.unit && run.unit.judge == run.unit.id }.unique { run -> run.unit.id }
    def unasked = judging.collectMany { run ->
        names.findAll { name -> !([run.unit.id, name] in taken) }.collect { name ->
            run.subMap(['unit', 'evaluate']) +
                [seed: seed, script: [], python: '', kinds: [], tables: [], name: name, method: name, recipe: run.usual]
        }
    }
    return (asked + unasked).collect { one ->
        one + [id: "${one.unit.id}.${one.method}".toString(), kind: kindOf(one.name)]
    }
}

// The unit whose store has the real cells that a unit's predictions are compared with. Rows that have more genes than
// they are scored on are compared with rows whose store has the scored genes alone, so that these are one comparison:
// same cells, same split, same part. Else it is the unit itself.
def judgeOf(unit, units) {
    def facts = { one ->
        [one.dataset, one.part, one.targets.key, one.split.recipe, "${one.split.toml}", !one.split.store,
            one.store.simulation?.id, one.store.inputs, one.store.obs, one.store.aliases, one.store.recipe,
            one.store.ready]
    }
    def other = !unit.scored.key ? null : units.find { one ->
        !one.scored.key && one.store.genes.key == unit.scored.key && facts.call(one) == facts.call(unit)
    }
    return (other ?: unit).id
}

// two splits or selections of one data set must not be taken for the same in the tables
def nameOf(unit, units) {
    def splits = units.findAll { other -> other.dataset == unit.dataset }.collect { other -> other.split.id }.unique()
    return splits.size() > 1 ? unit.split.id : unit.dataset
}

// nor what was chosen by with what was not, nor scores on some genes with those on others
def labelOf(unit, units) {
    def others = units.findAll { other -> other.split.id == unit.split.id && other.part == unit.part }
    def place  = others.findIndexOf { other -> other.id == unit.id }
    return [nameOf(unit, units), unit.part == 'test' ? '' : unit.part, place ? "genes${place + 1}" : '']
        .findAll().join('.')
}

// a finetuning run starts anew when its pretraining changes
def afterInit(run, runs) {
    def init = runs.find { other -> other.id == run.init && other.mode == 'pretrain' }
    return init ? run + [checkpoints: "${run.checkpoints}-${digest([init.checkpoints])}".toString()] : run
}

// the files that gene lists and semantic tables are, each once
def filesOf(runs, units, stores, makers) {
    def marks = runs.collectMany { run -> run.tables + [run.genes] } + stores.collect { store -> store.genes } +
        units.collectMany { unit -> [unit.scored, unit.targets] } +
        makers.vocabularies.collectMany { one -> one.added } + makers.imports.collectMany { one -> one.tables }
    return marks.findAll { mark -> mark.file }.unique { mark -> mark.key }
}

// rows that sample a table of conditions are not scored, so that they need no split
def planOf(rows, folder, options) {
    def makers = makersOf(rows.findAll { row -> isMaker(row.mode) }, options.rules, folder)
    def drafts = rows.findAll { row -> !isMaker(row.mode) }.collect { row -> runOf(row, rows, folder, options) }
    def asked  = drafts.findAll { run -> run.unit && !run.conditions }.collect { run -> run.unit }
        .unique { unit -> unit.id }
    def judges = asked.collectEntries { unit -> [(unit.id): judgeOf(unit, asked)] }
    def runs   = drafts.collect { run -> afterInit(run, drafts) }
        .collect { run -> run.unit ? run + [unit: run.unit + [judge: judges[run.unit.id]]] : run }
    def scored = runs.findAll { run -> !run.conditions }
    def units  = scored.findAll { run -> run.unit }.collect { run -> run.unit }.unique { unit -> unit.id }
    def judging = units.findAll { unit -> unit.judge == unit.id }
    def judge  = { unit -> units.find { other -> other.id == unit.judge } }
    def stores = runs.collectMany { run -> run.stores }.unique { store -> store.id }
    def checks = checksOf(units, stores)
    def first  = units.collectEntries { unit -> [(unit.id): scored.find { run -> run.unit?.id == unit.id }] }
    def labels = units.collectEntries { unit -> [(unit.id): labelOf(judge.call(unit), judging)] }
    def groups = units.collectEntries { unit ->
        [(unit.id): collectionOf(judge.call(unit), scored, nameOf(judge.call(unit), judging))]
    }
    def models = runs.findAll { run -> isModel(run.mode) }
    def others = baselinesOf(scored, options.baselines, options.seed)
    def priors = runs.findAll { run -> run.mode == 'pretrain' }.collectMany { run -> run.stores }
        .collect { store -> store.genes.key }
    def pairs  = units.unique(false) { unit -> unit.split.id }
        .collect { unit -> [id: unit.split.id, store: unit.store.id] + paperOf(unit.store, priors) }
    def bare   = stores.findAll { store -> !pairs.any { pair -> pair.store == store.id } }
        .collect { store -> [id: store.id, store: store.id] + paperOf(store, priors) }
    def fetched = (stores + makers.vocabularies).collectMany { one -> one.fetch }.unique()
    return makers + [
        fetches: fetched.collect { name -> [id: name, folder: "${fetchFolder()}".toString()] },
        files: filesOf(runs, units, stores, makers),
        checks: checks, runs: runs, pairs: pairs, models: models,
        stores: stores.collect { store -> store + [checks: checksBefore(store, checks)] },
        splits: units.collect { unit -> unit.split }.unique { split -> split.id }
            .collect { split -> split + [checks: checksBefore(split, checks)] },
        bare: bare,   // stores without a split
        simulations: stores.findAll { store -> store.simulation }.collect { store -> store.simulation }
            .unique { drawn -> drawn.id },
        units: units.collect { unit ->
            [id: unit.id, judge: unit.judge, pair: unit.split.id, part: unit.part, label: labels[unit.id],
                evaluate: first[unit.id].evaluate, scored: unit.scored.key, targets: unit.targets.key]
        },
        baselines: others.findAll { one -> one.kind == 'built-in' },
        externals: others.findAll { one -> one.kind != 'built-in' },
        expected: expectedOf(scored, runs, others, labels, checks),
        design: designOf(models.findAll { run -> !run.conditions }, others, labels, groups),
    ]
}
