// Predictions → metrics, beside what replicates of the real cells reach.

include { CALIBRATE                } from '../../modules/local/calibrate'
include { CEILING; CEILING as ENDS } from '../../modules/local/ceiling'
include { EVALUATE                 } from '../../modules/local/evaluate'
include { MERGE as MERGE_METRICS   } from '../../modules/local/merge'
include { byName; spread           } from '../../modules/plan/parts'

workflow SCORE {
    take:
    plan
    units        // id, store folder, split parquet
    scales       // id, the genes that are scored, table of target genes
    predictions  // meta, h5ad

    main:
    // what is made of the real cells alone
    asked = { wanted ->
        channel.fromList(wanted)
            .map { one -> tuple(one.unit, one) }
            .combine(units, by: 0)
            .combine(scales, by: 0)
            .map { _unit, one, store, split, genes, targets ->
                tuple(one.subMap(['id', 'unit', 'dataset', 'seed', 'part']), store, split, one.recipe, genes, targets)
            }
    }
    CALIBRATE(asked.call(plan.calibrations))
    ENDS(asked.call(plan.ends))
    // a data set whose calibration or ends failed, or that has none, is scored without
    once = CALIBRATE.out.calibration.mix(ENDS.out.metrics).map { meta, folder -> tuple(meta.unit, folder) }
    known = units.map { unit, _store, _split -> tuple(unit, unit) }
        .join(once, remainder: true)
        .map { unit, _same, folder -> tuple(unit, folder ?: []) }
    // an evaluation may be spread over tasks, and their parts are merged
    EVALUATE(
        predictions.filter { meta, _cells -> plan.scoring[meta.id] }
            .map { meta, cells -> tuple(plan.scoring[meta.id].unit, plan.scoring[meta.id], cells) }
            .combine(units, by: 0)
            .combine(known, by: 0)
            .combine(scales, by: 0)
            .map { _unit, one, cells, store, _split, folder, genes, targets ->
                def meta = one.subMap(['id', 'method', 'dataset', 'seed', 'byCounts'])
                tuple(meta, cells, store, one.recipe, one.calibrated ? folder : [], genes, targets)
            }
            .flatMap { job -> spread(job, job[0].byCounts ? 1 : plan.shards.evaluation) }
    )
    CEILING(asked.call(plan.ceilings).flatMap { job -> spread(job, plan.shards.evaluation) })
    scored = EVALUATE.out.metrics.mix(CEILING.out.metrics)
    MERGE_METRICS(
        scored.filter { meta, _scores -> meta.shard }
            .map { meta, scores -> tuple(groupKey(meta.whole, plan.shards.evaluation), scores) }
            .groupTuple()
            .map { key, parts -> tuple([id: "${key}".toString()], byName(parts), []) }
    )

    metrics = scored.filter { meta, _scores -> !meta.shard }
        .mix(MERGE_METRICS.out.whole)
        .map { _meta, scores -> scores }
    versions = EVALUATE.out.versions.mix(CALIBRATE.out.versions, ENDS.out.versions)
        .mix(CEILING.out.versions, MERGE_METRICS.out.versions)

    emit:
    metrics   // folder
    versions
}
