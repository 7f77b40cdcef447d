// Predictions → metrics, beside what replicates of the real cells reach.

include { CALIBRATE              } from '../../modules/local/calibrate'
include { CEILING                } from '../../modules/local/ceiling'
include { EVALUATE               } from '../../modules/local/evaluate'
include { MERGE as MERGE_METRICS } from '../../modules/local/merge'
include { byName; spread         } from '../../modules/plan/parts'

workflow SCORE {
    take:
    plan
    units        // id, store folder, split parquet
    scales       // id, the genes that are scored, table of target genes
    predictions  // meta, h5ad

    main:
    CALIBRATE(
        channel.fromList(plan.calibrations)
            .map { one -> tuple(one.unit, one) }
            .combine(units, by: 0)
            .combine(scales, by: 0)
            .map { _unit, one, store, split, genes, targets ->
                tuple(one.subMap(['id', 'unit', 'dataset', 'seed', 'part']), store, split, one.recipe, genes, targets)
            }
    )
    // a data set whose calibration failed, or that has none, is scored without
    calibrations = units.map { unit, _store, _split -> tuple(unit, unit) }
        .join(CALIBRATE.out.calibration.map { meta, folder -> tuple(meta.unit, folder) }, remainder: true)
        .map { unit, _same, folder -> tuple(unit, folder ?: []) }
    // an evaluation may be spread over tasks, and their parts are merged
    EVALUATE(
        predictions.filter { meta, _cells -> plan.scoring[meta.id] }
            .map { meta, cells -> tuple(plan.scoring[meta.id].unit, plan.scoring[meta.id], cells) }
            .combine(units, by: 0)
            .combine(calibrations, by: 0)
            .combine(scales, by: 0)
            .map { _unit, one, cells, store, _split, calibration, genes, targets ->
                def known = one.calibrated ? calibration : []
                def meta  = one.subMap(['id', 'method', 'dataset', 'seed'])
                tuple(meta, cells, store, one.recipe, known, genes, targets)
            }
            .flatMap { job -> spread(job, plan.shards.evaluation) }
    )
    CEILING(
        channel.fromList(plan.ceilings)
            .map { one -> tuple(one.unit, one) }
            .combine(units, by: 0)
            .combine(scales, by: 0)
            .map { _unit, one, store, split, genes, targets ->
                tuple(one.subMap(['id', 'dataset', 'seed', 'part']), store, split, one.recipe, genes, targets)
            }
            .flatMap { job -> spread(job, plan.shards.evaluation) }
    )
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
    versions = EVALUATE.out.versions.mix(CALIBRATE.out.versions, CEILING.out.versions, MERGE_METRICS.out.versions)

    emit:
    metrics   // folder
    versions
}
