#!/usr/bin/env nextflow

// perturbdiff: raw counts → store → split → model or baseline → predictions → metrics → one report.
// A sheet lists runs; stores and splits that runs have in common are made once. docs/workflow.md

include { askSlurm        } from './modules/plan/slurm'
include { checkParameters } from './modules/plan/parameters'
include { checkSite       } from './modules/plan/site'
include { checkTools; imageOf; toolImages } from './modules/plan/installed'
include { imageRecord     } from './modules/plan/image'
include { planOf          } from './modules/plan/experiment'
include { compares        } from './modules/plan/comparison'
include { checkPublishing } from './modules/plan/publishing'
include { readRows        } from './modules/plan/samplesheet'
include { logName; writeRecord } from './modules/plan/record'
include { isModel         } from './modules/plan/models'
include { costOf; settle; studyOf } from './modules/plan/studies'

include { BASELINE   } from './modules/local/baseline'
include { CEILING    } from './modules/local/ceiling'
include { EXTERNAL   } from './modules/local/external'
include { EVALUATE   } from './modules/local/evaluate'
include { FINETUNE   } from './modules/local/finetune'
include { MERGE as MERGE_METRICS; MERGE as MERGE_PREDICTIONS } from './modules/local/merge'
include { PREPROCESS } from './modules/local/preprocess'
include { PRETRAIN   } from './modules/local/pretrain'
include { REPORT     } from './modules/local/report'
include { SAMPLE     } from './modules/local/sample'
include { SIMULATE   } from './modules/local/simulate'
include { SPLIT; SPLIT as SPLIT_FIRST } from './modules/local/split'
include { STATS      } from './modules/local/stats'
include { TRAIN      } from './modules/local/train'

def readPlan() {
    def checkpoints = file(params.ckpt_dir, glob: false).toAbsolutePath()
    def study   = studyOf(params.experiment)
    def sheet   = study ? study.sheet : file(params.input, checkIfExists: true, glob: false)
    def choices = new groovy.json.JsonSlurper().parseText(file("${projectDir}/nextflow_schema.json").text)['$defs'].runs.properties.baselines['x-choices']
    def chosen  = settle(params, study, choices)
    def names   = chosen.baselines.split(',').collect { name -> name.trim() }.findAll { name -> name && name != 'none' }
    def unknown = names.findAll { name -> !(name in choices) }
    if (unknown) { error("--baselines: unknown ${unknown.join(', ')}; built in: ${choices.join(', ')}, or none") }
    def rows = readRows(sheet, file("${projectDir}/assets/schema_input.json"), params.container != null)
    // given to tasks as inputs: the strict parser leaves parameters and ext.args out of what -resume compares
    def evaluation = [alpha: params.alpha, context_column: params.context_column].findAll { _key, value -> value != null }
    def figures = study?.figures ?: []
    if (study) { log.info "perturbdiff: experiment ${study.name}: ${study.title}; ${costOf(study)}" }
    return planOf(rows, sheet.parent, [seed: params.data_seed, checkpoints: checkpoints, baselines: names, evaluation: evaluation]) +
        [checkpoints: checkpoints, chosen: chosen, figures: figures, sheet: sheet, compares: study || compares(rows)]
}

// everything that can be known to be wrong is told before the first task; then what tasks write to is made
def prepare(plan) {
    def config = nextflow.Global.session.config   // as it is after all profiles and the site's own
    def tools  = plan.externals.findAll { one -> one.kind == 'tool' }.collect { one -> one.name }.unique().sort()
    if (!workflow.stubRun) { checkTools(tools, params) }   // a task that only says that it would run needs none
    if (config.process.executor == 'slurm' && params.check_slurm) { askSlurm(params, config.process, config.executor) }
    checkPublishing(params, workflow, plan.sheet, plan)
    // a container can only bind what exists
    [plan.checkpoints, file("${params.outdir}/logs", glob: false)].each { folder -> folder.mkdirs() }
    def name = params.container ? "${params.container}".toString() : null
    def image  = imageRecord(!name || name.contains('://') ? name : new java.io.File(name).absolutePath)
    def images = name && !workflow.stubRun ? toolImages(tools, params).collectEntries { tool, path -> [(tool): imageRecord(path)] } : [:]
    // for beforeScript in conf/base.config
    if (image?.id) { System.setProperty('perturbdiff.image', image.id) }
    images.values().each { one -> System.setProperty("perturbdiff.image:${one.path}", one.id) }
    writeRecord(params + plan.chosen, workflow, image, images)
    file("${params.outdir}/pipeline_info/design.csv", glob: false).text = plan.design.join('\n') + '\n'
}

// what the failed tasks said last: an ignored error is not shown otherwise
def complaints() {
    def records = file("${params.outdir}/pipeline_info/trace_${params.report_stamp}.tsv")
    if (!records.exists()) { return [] }
    def tasks = records.splitCsv(header: true, sep: '\t')
    def well  = tasks.findAll { task -> task.status in ['COMPLETED', 'CACHED'] }.collect { task -> task.name }
    // the last try of each task that did not succeed in the end
    return tasks.findAll { task -> task.status == 'FAILED' && !(task.name in well) }.reverse().unique { task -> task.name }.collect { task ->
        // what fails before the command, e.g. a module that cannot be loaded, is in the wrapper's log alone
        def lines  = ['.command.err', '.command.log'].collect { name -> file("${task.workdir}/${name}") }.collect { log -> log.exists() ? log.readLines().findAll { line -> line.trim() } : [] }.find { said -> said } ?: []
        def own    = file("${params.outdir}/logs/${logName(task.process, task.tag == '-' ? null : task.tag)}")
        "${task.name} (exit ${task.exit}): ${lines ? lines[-1].trim() : 'no message'}\n    ${own.exists() ? "log ${own}" : 'no log'}, work folder ${task.workdir}"
    }
}

// a function, because `workflow` is null in an onComplete closure of the entry workflow
def summarise() {
    def stats  = workflow.stats
    def failed = complaints()
    log.info "perturbdiff: ${stats.succeedCount} tasks ran, ${stats.cachedCount} cached, ${stats.retriesCount} retried, ${failed.size()} failed"
    if (failed) { log.warn "these failed, and what needs them is missing from the report; mend them and run again with -resume\n  ${failed.join('\n  ')}" }
    if (file("${params.outdir}/report.html").exists()) { log.info "perturbdiff: report in ${params.outdir}/report.html" }
    log.info "perturbdiff: logs in ${params.outdir}/logs, records of the run in ${params.outdir}/pipeline_info"
}

// raw counts → stores and splits
workflow DATA {
    take:
    plan

    main:
    SIMULATE(channel.fromList(plan.simulations).map { one -> tuple([id: one.id], one.recipe, one.seed) })
    simulated = SIMULATE.out.counts.map { meta, counts -> tuple(meta.id, counts) }
    origins   = channel.fromList(plan.stores + plan.splits.findAll { one -> !one.store })
    raw = origins.filter { one -> !one.simulation }.map { one -> tuple(one.id, one.inputs) }
        .mix(origins.filter { one -> one.simulation }.map { one -> tuple(one.simulation.id, one.id) }
            .combine(simulated, by: 0).map { _drawn, id, counts -> tuple(id, counts) })

    // genes chosen from training cells: the split comes first and reads the input
    early = channel.fromList(plan.splits.findAll { one -> !one.store })
    SPLIT_FIRST(early.map { one -> tuple(one.id, one) }.combine(raw, by: 0)
        .map { id, one, source -> tuple([id: id], source, one.toml, one.recipe, one.seed) })
    firstSplits = SPLIT_FIRST.out.split.map { meta, split -> tuple(meta.id, split) }

    wanted = channel.fromList(plan.stores).map { one -> tuple(one.id, one) }.combine(raw, by: 0)
    PREPROCESS(wanted.filter { _id, one, _source -> !one.split }.map { _id, one, source -> tuple(one, source, []) }
        .mix(wanted.filter { _id, one, _source -> one.split }.map { _id, one, source -> tuple(one.split, one, source) }
            .combine(firstSplits, by: 0).map { _split, one, source, split -> tuple(one, source, split) })
        .map { one, source, split -> tuple([id: one.id], source, split, one.genes, one.recipe, one.seed) })
    stores = PREPROCESS.out.store.map { meta, store -> tuple(meta.id, store) }

    // otherwise it reads the store
    SPLIT(channel.fromList(plan.splits.findAll { one -> one.store }).map { one -> tuple(one.store, one) }.combine(stores, by: 0)
        .map { _id, one, store -> tuple([id: one.id], store, one.toml, one.recipe, one.seed) })
    splits = firstSplits.mix(SPLIT.out.split.map { meta, split -> tuple(meta.id, split) })

    pairs = channel.fromList(plan.pairs).map { pair -> tuple(pair.store, pair.id) }.combine(stores, by: 0)
        .map { _id, pair, store -> tuple(pair, store) }.combine(splits, by: 0)
    units = channel.fromList(plan.units).map { unit -> tuple(unit.pair, unit.id) }.combine(pairs, by: 0)
        .map { _pair, unit, store, split -> tuple(unit, store, split) }
    bare  = channel.fromList(plan.stores.collect { one -> one.id } - plan.pairs.collect { pair -> pair.store }).combine(stores.map { id, store -> tuple(id, store) })
        .filter { wantedId, id, _store -> wantedId == id }.map { id, _id, store -> tuple([id: id], store, []) }
    STATS(pairs.map { id, store, split -> tuple([id: id], store, split) }.mix(bare))

    statistics = STATS.out.tables.map { _meta, tables -> tables }
    versions   = SIMULATE.out.versions.mix(SPLIT_FIRST.out.versions, PREPROCESS.out.versions, SPLIT.out.versions, STATS.out.versions)

    emit:
    stores      // id, folder
    splits      // id, parquet
    pairs       // id, store folder, split parquet
    units       // id, store folder, split parquet: a pair for each part that is predicted
    statistics  // folder
    versions
}

// stores and splits → bundles
workflow FIT {
    take:
    plan
    stores
    pairs

    main:
    runs   = plan.runs
    fitted = { mode -> channel.fromList(runs.findAll { run -> run.mode == mode }) }

    // a pretraining run waits for all its stores and for the splits of the runs that start from it
    own = channel.fromList(runs.findAll { run -> run.mode == 'pretrain' }.collectMany { run ->
            run.stores.collect { store -> tuple(store.id, groupKey(run.id, run.stores.size())) } })
        .combine(stores, by: 0).map { id, key, store -> tuple(key, tuple(id, store)) }
        .groupTuple().map { key, found -> tuple("${key}".toString(), found.sort { one -> one[0] }.collect { one -> one[1] }) }
    later = runs.findAll { run -> run.mode == 'pretrain' }
        .collectEntries { run -> [(run.id): runs.findAll { other -> other.init == run.id }.collect { other -> other.unit.split.id }.unique()] }
    held = channel.fromList(later.collectMany { id, ids -> ids.collect { pair -> tuple(pair, groupKey(id, ids.size())) } })
        .combine(pairs, by: 0).map { pair, key, store, split -> tuple(key, tuple(pair, store, split)) }
        .groupTuple().map { key, found -> tuple("${key}".toString(), found.sort { one -> one[0] }) }
        .map { id, found -> tuple(id, found.collect { one -> one[1] }, found.collect { one -> one[2] }) }
        .mix(channel.fromList(later.findAll { _id, ids -> !ids }.collect { id, _ids -> tuple(id, [], []) }))
    PRETRAIN(fitted.call('pretrain').map { run -> tuple(run.id, run) }.combine(own, by: 0).combine(held, by: 0)
        .map { id, run, found, heldStores, heldSplits -> tuple([id: id, seed: run.seed, kinds: run.kinds], found, heldStores, heldSplits, run.tables, run.recipe, run.checkpoints) })
    pretrained = PRETRAIN.out.bundle.map { meta, bundle -> tuple(meta.id, bundle) }

    TRAIN(fitted.call('train').map { run -> tuple(run.unit.split.id, run) }.combine(pairs, by: 0)
        .map { _pair, run, store, split -> tuple([id: run.id, seed: run.seed, kinds: run.kinds], store, split, run.tables, run.recipe, run.checkpoints) })

    starts = fitted.call('finetune').filter { run -> run.bundle }.map { run -> tuple(run, run.bundle) }
        .mix(fitted.call('finetune').filter { run -> !run.bundle }.map { run -> tuple(run.init, run) }
            .combine(pretrained, by: 0).map { _init, run, bundle -> tuple(run, bundle) })
    FINETUNE(starts.map { run, bundle -> tuple(run.unit.split.id, run, bundle) }.combine(pairs, by: 0)
        .map { _pair, run, bundle, store, split -> tuple([id: run.id, seed: run.seed, transfer: run.transfer, kinds: run.kinds], store, split, bundle, run.tables, run.recipe, run.checkpoints) })

    bundles  = TRAIN.out.bundle.mix(FINETUNE.out.bundle, PRETRAIN.out.bundle)
    versions = PRETRAIN.out.versions.mix(TRAIN.out.versions, FINETUNE.out.versions)

    emit:
    bundles  // meta, folder
    versions
}

// bundles and baselines → predictions → metrics
workflow SCORE {
    take:
    plan
    units
    bundles

    main:
    models = plan.runs.findAll { run -> isModel(run.mode) }
    byName = { one, other -> one.name <=> other.name }
    // one task does a job, or several do, each a part, and their parts are merged
    spread = { job, number -> number == 1 ? [job] : (0..<number).collect { i ->
        [job[0] + [id: "${job[0].id}.part-${i}-of-${number}".toString(), whole: job[0].id, shard: "${i}/${number}".toString()]] + job.drop(1) } }
    pieces = params.sample_shards as int
    given  = { run -> run.mode == 'sample' && run.bundle }   // a folder, which no run of this sheet makes
    SAMPLE(channel.fromList(models.findAll { run -> !given.call(run) }).map { run -> tuple(run.mode == 'sample' ? run.init : run.id, run) }
        .combine(bundles.map { meta, bundle -> tuple(meta.id, bundle) }, by: 0)
        .mix(channel.fromList(models.findAll { run -> given.call(run) }).map { run -> tuple('', run, run.bundle) })
        .map { _id, run, bundle -> tuple(run.unit.id, run, bundle) }.combine(units, by: 0)
        .map { _unit, run, bundle, store, split -> tuple([id: run.id, seed: run.seed, part: run.unit.part, step: run.step], bundle, store, split, run.sample) }.flatMap { job -> spread.call(job, pieces) })
    MERGE_PREDICTIONS(SAMPLE.out.predictions.join(SAMPLE.out.records).filter { meta, _predictions, _records -> meta.shard }
        .map { meta, predictions, records -> tuple(groupKey(meta.whole, pieces), predictions, records) }
        .groupTuple().map { key, parts, records -> tuple([id: "${key}.h5ad".toString(), run: "${key}".toString()], parts.sort(byName), records.flatten().sort(byName)) })
    sampled = SAMPLE.out.predictions.filter { meta, _predictions -> !meta.shard }
        .mix(MERGE_PREDICTIONS.out.whole.map { meta, predictions -> tuple([id: meta.run], predictions) })
    EXTERNAL(channel.fromList(plan.externals).map { one -> tuple(one.unit.id, one) }.combine(units, by: 0)
        .map { _unit, one, store, split -> tuple([id: one.id, name: one.name, seed: one.seed, part: one.unit.part, python: one.python, image: imageOf(one.name, params)], store, split, one.script, one.recipe) })
    BASELINE(channel.fromList(plan.baselines).map { one -> tuple(one.unit.id, one) }.combine(units, by: 0)
        .map { _unit, one, store, split -> tuple([id: one.id, name: one.name, seed: one.seed, part: one.unit.part], store, split) })

    // how each prediction is scored: its unit, its name in the tables and its recipe
    labels  = plan.units.collectEntries { unit -> [(unit.id): unit.label] }
    scoring = models.collectEntries { run -> [(run.id): [unit: run.unit.id, method: run.id, recipe: run.evaluate]] } +
        (plan.baselines + plan.externals).collectEntries { one -> [(one.id): [unit: one.unit.id, method: one.method, recipe: one.evaluate]] }
    shards  = params.evaluation_shards as int
    EVALUATE(sampled.mix(BASELINE.out.predictions, EXTERNAL.out.predictions)
        .map { meta, predictions -> tuple(scoring[meta.id].unit, meta.id, predictions) }.combine(units, by: 0)
        .map { unit, id, predictions, store, _split ->
            tuple([id: "${id}.metrics".toString(), method: scoring[id].method, dataset: labels[unit], seed: params.evaluation_seed], predictions, store, scoring[id].recipe) }.flatMap { job -> spread.call(job, shards) })
    CEILING(channel.fromList(plan.chosen.ceiling ? plan.units : []).map { unit -> tuple(unit.id, unit) }.combine(units, by: 0)
        .map { id, unit, store, split -> tuple([id: "${id}.ceiling.metrics".toString(), dataset: unit.label, seed: params.evaluation_seed, part: unit.part], store, split, unit.evaluate) }.flatMap { job -> spread.call(job, shards) })

    scored = EVALUATE.out.metrics.mix(CEILING.out.metrics)
    MERGE_METRICS(scored.filter { meta, _scores -> meta.shard }.map { meta, scores -> tuple(groupKey(meta.whole, shards), scores) }
        .groupTuple().map { key, parts -> tuple([id: "${key}".toString()], parts.sort(byName), []) })

    records  = SAMPLE.out.records.filter { meta, _files -> !meta.shard }.map { _meta, files -> files }
        .mix(MERGE_PREDICTIONS.out.records, BASELINE.out.records, EXTERNAL.out.records).flatten()
    metrics  = scored.filter { meta, _scores -> !meta.shard }.mix(MERGE_METRICS.out.whole).map { _meta, scores -> scores }
    versions = SAMPLE.out.versions.mix(BASELINE.out.versions, EXTERNAL.out.versions, EVALUATE.out.versions, CEILING.out.versions, MERGE_METRICS.out.versions, MERGE_PREDICTIONS.out.versions)

    emit:
    metrics  // folder
    records  // JSON files: what made each prediction, and how long it took
    versions
}

workflow {
    checkParameters(params, file("${projectDir}/nextflow_schema.json"), workflow)
    checkSite(params, workflow.profile.split(',') as List, workflow.workDir)
    plan = readPlan()
    prepare(plan)
    DATA(plan)
    FIT(plan, DATA.out.stores, DATA.out.pairs)
    SCORE(plan, DATA.out.units, FIT.out.bundles)

    // sorted by name, so that the order in which tasks end does not matter to -resume; no metrics, no report
    byName = { one, other -> one.name <=> other.name }
    // what is missing is in the report with its reason, which may be another one each time: so it is made again
    metrics = SCORE.out.metrics.toSortedList(byName).filter { found -> found }
        .map { found -> tuple(found, found.size() < plan.expected.size() - 1 + (plan.chosen.ceiling ? plan.units.size() : 0) ? params.report_stamp : '') }
    REPORT(
        metrics.map { found, _missing -> found },
        FIT.out.bundles.map { _meta, bundle -> bundle }.toSortedList(byName),
        DATA.out.statistics.toSortedList(byName),
        DATA.out.splits.map { _id, split -> split }.toSortedList(byName),
        SCORE.out.records.toSortedList(byName),
        metrics.map { _found, missing -> tuple(plan.expected, missing) },
        plan.compares ? plan.design : [],
        plan.figures ? file("${projectDir}/assets/paper_results.csv") : [],
        [title: plan.chosen.title, against: plan.chosen.against, figures: plan.figures.join(',')].findAll { _name, value -> value },
    )
    DATA.out.versions.mix(FIT.out.versions, SCORE.out.versions, REPORT.out.versions)
        .map { found -> found.text }.unique()
        .collectFile(name: 'versions.yml', storeDir: "${params.outdir}/pipeline_info", sort: true)

    workflow.onComplete { summarise() }
}
