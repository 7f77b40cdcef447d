// Bundles, baselines and external methods → predictions.

include { BASELINE                   } from '../../modules/local/baseline'
include { EXTERNAL                   } from '../../modules/local/external'
include { MERGE as MERGE_PREDICTIONS } from '../../modules/local/merge'
include { SAMPLE                     } from '../../modules/local/sample'
include { byName; spread             } from '../../modules/plan/parts'
include { GATHER as GATHER_FOR_SAMPLE; GATHER as GATHER_FOR_BASELINE } from './gather'

workflow PREDICT {
    take:
    plan
    stores   // id, folder
    units    // id, store folder, split parquet
    things   // key, path
    bundles  // id, folder

    main:
    // with the bundle of a folder, which no run of this sheet makes
    given = plan.models.findAll { run -> run.mode == 'sample' && run.bundle }
    made  = plan.models.findAll { run -> !(run.mode == 'sample' && run.bundle) }

    // a sampling may be spread over tasks, and their parts are merged
    fitted = channel.fromList(made)
        .map { run -> tuple(run.mode == 'sample' ? run.init : run.id, run) }
        .combine(bundles, by: 0)
        .map { _id, run, bundle -> tuple(run.unit.id, run, bundle) }
    ready = fitted.mix(channel.fromList(given).map { run -> tuple(run.unit.id, run, run.bundle) })
    // a table of conditions is predicted from the store, without a split
    tabled = ready.filter { _unit, run, _bundle -> run.conditions }
        .map { _unit, run, bundle -> tuple(run.unit.store.id, run, bundle) }
        .combine(stores, by: 0)
        .map { _id, run, bundle, store -> tuple(run.id, run, bundle, store, []) }
    parted = ready.filter { _unit, run, _bundle -> !run.conditions }
        .combine(units, by: 0)
        .map { _unit, run, bundle, store, split -> tuple(run.id, run, bundle, store, split) }
    // a model that was fitted here has the semantic tables of its row already
    asked  = plan.models.collect { run -> [run.id, run.mode == 'sample' ? run.tables.collect { one -> one.key } : []] }
    GATHER_FOR_SAMPLE(asked, things)
    SAMPLE(
        tabled.mix(parted)
            .combine(GATHER_FOR_SAMPLE.out.gathered, by: 0)
            .map { _id, run, bundle, store, split, tables ->
                def meta = run.subMap(['id', 'seed', 'step', 'options', 'changes']) +
                    [part: run.unit.part, kinds: tables ? run.kinds : []]
                tuple(meta, bundle, store, split, run.conditions, tables, run.sample)
            }
            .flatMap { job -> spread(job, plan.shards.sample) }
    )
    MERGE_PREDICTIONS(
        SAMPLE.out.predictions.join(SAMPLE.out.records)
            .filter { meta, _predictions, _records -> meta.shard }
            .map { meta, predictions, records -> tuple(groupKey(meta.whole, plan.shards.sample), predictions, records) }
            .groupTuple()
            .map { key, parts, records ->
                def meta = [id: "${key}.h5ad".toString(), run: "${key}".toString()]
                tuple(meta, byName(parts), byName(records.flatten()))
            }
    )
    merged  = MERGE_PREDICTIONS.out.whole.map { meta, predictions -> tuple([id: meta.run], predictions) }
    sampled = SAMPLE.out.predictions.filter { meta, _predictions -> !meta.shard }

    EXTERNAL(
        channel.fromList(plan.externals)
            .map { one -> tuple(one.unit.id, one) }
            .combine(units, by: 0)
            .map { _unit, one, store, split ->
                def meta = one.subMap(['id', 'name', 'seed', 'python', 'image']) + [part: one.unit.part]
                tuple(meta, store, split, one.script, one.recipe)
            }
    )
    GATHER_FOR_BASELINE(plan.baselines.collect { one -> [one.id, one.tables.collect { mark -> mark.key }] }, things)
    BASELINE(
        channel.fromList(plan.baselines)
            .map { one -> tuple(one.unit.id, one) }
            .combine(units, by: 0)
            .map { _unit, one, store, split -> tuple(one.id, one, store, split) }
            .combine(GATHER_FOR_BASELINE.out.gathered, by: 0)
            .map { _id, one, store, split, tables ->
                tuple(one.subMap(['id', 'name', 'seed', 'kinds']) + [part: one.unit.part], store, split, tables)
            }
    )

    predictions = sampled.mix(merged, BASELINE.out.predictions, EXTERNAL.out.predictions)
    records     = SAMPLE.out.records.filter { meta, _files -> !meta.shard }.map { _meta, files -> files }
        .mix(MERGE_PREDICTIONS.out.records, BASELINE.out.records, EXTERNAL.out.records)
        .flatten()
    versions = SAMPLE.out.versions.mix(MERGE_PREDICTIONS.out.versions, BASELINE.out.versions, EXTERNAL.out.versions)

    emit:
    predictions  // meta, h5ad
    records      // JSON files: what made each prediction, and how long it took
    versions
}
