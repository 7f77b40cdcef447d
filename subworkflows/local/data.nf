// Raw counts → stores, splits and their statistics. Runs that have one in common share it.

include { PREPROCESS                  } from '../../modules/local/preprocess'
include { SIMULATE                    } from '../../modules/local/simulate'
include { SPLIT; SPLIT as SPLIT_FIRST } from '../../modules/local/split'
include { STATS                       } from '../../modules/local/stats'

workflow DATA {
    take:
    plan

    main:
    // genes chosen from training cells: the split comes first and reads the input; otherwise it reads the store
    early = plan.splits.findAll { one -> !one.store }
    late  = plan.splits.findAll { one -> one.store }

    SIMULATE(channel.fromList(plan.simulations).map { one -> tuple([id: one.id, seed: one.seed], one.recipe) })
    simulated = SIMULATE.out.counts.map { meta, counts -> tuple(meta.id, counts) }

    origins = plan.stores + early
    drawn   = channel.fromList(origins.findAll { one -> one.simulation })
        .map { one -> tuple(one.simulation.id, one.id) }
        .combine(simulated, by: 0)
        .map { _simulation, id, counts -> tuple(id, counts) }
    raw = channel.fromList(origins.findAll { one -> !one.simulation })
        .map { one -> tuple(one.id, one.inputs) }
        .mix(drawn)

    SPLIT_FIRST(
        channel.fromList(early)
            .map { one -> tuple(one.id, one) }
            .combine(raw, by: 0)
            .map { id, one, source -> tuple([id: id, seed: one.seed], source, one.obs, one.toml, one.recipe) }
    )
    firstSplits = SPLIT_FIRST.out.split.map { meta, split -> tuple(meta.id, split) }

    wanted = channel.fromList(plan.stores).map { one -> tuple(one.id, one) }.combine(raw, by: 0)
    after  = wanted.filter { _id, one, _source -> one.split }
        .map { _id, one, source -> tuple(one.split, one, source) }
        .combine(firstSplits, by: 0)
        .map { _split, one, source, split -> tuple(one, source, split) }
    PREPROCESS(
        wanted.filter { _id, one, _source -> !one.split }
            .map { _id, one, source -> tuple(one, source, []) }
            .mix(after)
            .map { one, source, split ->
                tuple([id: one.id, seed: one.seed], source, one.obs, split, one.genes, one.recipe)
            }
    )
    stores = PREPROCESS.out.store.map { meta, store -> tuple(meta.id, store) }

    SPLIT(
        channel.fromList(late)
            .map { one -> tuple(one.store, one) }
            .combine(stores, by: 0)
            .map { _id, one, store -> tuple([id: one.id, seed: one.seed], store, [], one.toml, one.recipe) }
    )
    splits = firstSplits.mix(SPLIT.out.split.map { meta, split -> tuple(meta.id, split) })

    pairs = channel.fromList(plan.pairs)
        .map { pair -> tuple(pair.store, pair.id) }
        .combine(stores, by: 0)
        .map { _id, pair, store -> tuple(pair, store) }
        .combine(splits, by: 0)
    units = channel.fromList(plan.units)
        .map { unit -> tuple(unit.pair, unit.id) }
        .combine(pairs, by: 0)
        .map { _pair, unit, store, split -> tuple(unit, store, split) }

    STATS(
        pairs.map { id, store, split -> tuple([id: id], store, split) }
            .mix(stores.filter { id, _store -> id in plan.bare }.map { id, store -> tuple([id: id], store, []) })
    )

    statistics = STATS.out.tables.map { _meta, tables -> tables }
    versions   = SIMULATE.out.versions
        .mix(SPLIT_FIRST.out.versions, PREPROCESS.out.versions, SPLIT.out.versions, STATS.out.versions)

    emit:
    stores      // id, folder
    splits      // id, parquet
    pairs       // id, store folder, split parquet
    units       // id, store folder, split parquet: a pair for each part that is predicted
    statistics  // folder
    versions
}
