// Raw counts → stores, splits and their statistics. Runs that have one in common share it. Before that, what rows make
// for others: gene lists, semantic tables and bundles from checkpoints.

include { CHECK                       } from '../../modules/local/check'
include { EMBED                       } from '../../modules/local/embed'
include { FETCH                       } from '../../modules/local/fetch'
include { IMPORT                      } from '../../modules/local/import'
include { PREPROCESS                  } from '../../modules/local/preprocess'
include { SIMULATE                    } from '../../modules/local/simulate'
include { SPLIT; SPLIT as SPLIT_FIRST } from '../../modules/local/split'
include { STATS                       } from '../../modules/local/stats'
include { VOCABULARY                  } from '../../modules/local/vocabulary'
include { VOCABULARY as VOCABULARY_OF_LISTS } from '../../modules/local/vocabulary'
include { GATHER as GATHER_FOR_IMPORT; GATHER as GATHER_FOR_LIST } from './gather'
include { GATHER as GATHER_FOR_RAW; GATHER as GATHER_FOR_UNIT    } from './gather'
include { GATHER as GATHER_FOR_CHECK                             } from './gather'

// what tasks of rows that make something are told beside files
def toldOf(one) {
    return one.subMap(['id', 'options', 'named', 'kinds'])
}

workflow DATA {
    take:
    plan

    main:
    files = channel.fromList(plan.files.collect { one -> tuple(one.key, one.file) } + [tuple('', [])])

    EMBED(channel.fromList(plan.embeddings).map { one -> tuple(toldOf(one), one.names, one.given) })
    vectors = EMBED.out.table.map { meta, table -> tuple("made ${meta.id}".toString(), table) }

    imported = plan.imports.collect { one -> [one.id, one.tables.collect { mark -> mark.key }] }
    GATHER_FOR_IMPORT(imported, files.mix(vectors))
    IMPORT(
        channel.fromList(plan.imports)
            .map { one -> tuple(one.id, one) }
            .combine(GATHER_FOR_IMPORT.out.gathered, by: 0)
            .map { _id, one, found -> tuple(toldOf(one), one.checkpoint, one.genes, found) }
    )

    // what reads a published data set that is not here waits for it, and stores and splits until it has been checked
    FETCH(channel.fromList(plan.fetches))
    fetched = FETCH.out.fetched.map { meta -> tuple(meta.id, meta.id) }
    GATHER_FOR_CHECK(plan.checks.collect { one -> [one.id, one.fetch] }, fetched)
    CHECK(
        channel.fromList(plan.checks)
            .map { one -> tuple(one.id, one) }
            .combine(GATHER_FOR_CHECK.out.gathered, by: 0)
            .map { id, one, _fetched ->
                tuple([id: id], one.inputs, one.obs, one.toml, one.aliases, one.genes, one.recipe)
            }
    )
    waiting = plan.vocabularies.collect { one -> ["list ${one.id}".toString(), one.fetch] } +
        (plan.stores + plan.splits.findAll { one -> !one.store }).collect { one -> [one.id, one.fetch + one.checks] }
    GATHER_FOR_RAW(waiting, fetched.mix(CHECK.out.checked.map { meta, _said -> tuple(meta.id, meta.id) }))
    allowed = GATHER_FOR_RAW.out.gathered

    // a list that lists of other rows are added to comes after these
    plainLists = plan.vocabularies.findAll { one -> one.added.every { mark -> mark.file } }
    laterLists = plan.vocabularies - plainLists
    VOCABULARY(
        channel.fromList(plainLists)
            .map { one -> tuple("list ${one.id}".toString(), one) }
            .combine(allowed, by: 0)
            .map { _id, one, _fetched ->
                tuple(toldOf(one), one.studies, one.added.collect { mark -> mark.file }, one.given, one.aliases,
                    one.recipe)
            }
    )
    lists = VOCABULARY.out.genes.map { meta, genes -> tuple("made ${meta.id}".toString(), genes) }
    joined = laterLists.collect { one -> [one.id, one.added.collect { mark -> mark.key }] }
    GATHER_FOR_LIST(joined, files.mix(lists))
    VOCABULARY_OF_LISTS(
        channel.fromList(laterLists)
            .map { one -> tuple("list ${one.id}".toString(), one) }
            .combine(allowed, by: 0)
            .map { _id, one, _fetched -> tuple(one.id, one) }
            .combine(GATHER_FOR_LIST.out.gathered, by: 0)
            .map { _id, one, added ->
                tuple(toldOf(one), one.studies, added, one.given, one.aliases, one.recipe)
            }
    )
    laterOnes = VOCABULARY_OF_LISTS.out.genes.map { meta, genes -> tuple("made ${meta.id}".toString(), genes) }
    things = files.mix(vectors, lists, laterOnes)

    // genes chosen from training cells: the split comes first and reads the input; otherwise it reads the store
    early = plan.splits.findAll { one -> !one.store }
    late  = plan.splits.findAll { one -> one.store }

    SIMULATE(channel.fromList(plan.simulations).map { one -> tuple([id: one.id, seed: one.seed], one.recipe) })
    simulated = SIMULATE.out.counts.map { meta, counts -> tuple(meta.id, counts) }

    origins = plan.stores.findAll { one -> !one.ready } + early
    drawn   = channel.fromList(origins.findAll { one -> one.simulation })
        .map { one -> tuple(one.simulation.id, one.id) }
        .combine(simulated, by: 0)
        .map { _simulation, id, counts -> tuple(id, counts) }
    raw = channel.fromList(origins.findAll { one -> !one.simulation })
        .map { one -> tuple(one.id, one.inputs) }
        .combine(allowed, by: 0)
        .map { id, inputs, _fetched -> tuple(id, inputs) }
        .mix(drawn)

    SPLIT_FIRST(
        channel.fromList(early)
            .map { one -> tuple(one.id, one) }
            .combine(raw, by: 0)
            .map { id, one, source -> tuple([id: id, seed: one.seed], source, one.obs, one.toml, one.recipe) }
    )
    firstSplits = SPLIT_FIRST.out.split.map { meta, split -> tuple(meta.id, split) }

    wanted = channel.fromList(plan.stores.findAll { one -> !one.ready })
        .map { one -> tuple(one.genes.key, one) }
        .combine(things, by: 0)
        .map { _key, one, genes -> tuple(one.id, one + [genes: genes]) }
        .combine(raw, by: 0)
    after  = wanted.filter { _id, one, _source -> one.split }
        .map { _id, one, source -> tuple(one.split, one, source) }
        .combine(firstSplits, by: 0)
        .map { _split, one, source, split -> tuple(one, source, split) }
    PREPROCESS(
        wanted.filter { _id, one, _source -> !one.split }
            .map { _id, one, source -> tuple(one, source, []) }
            .mix(after)
            .map { one, source, split ->
                tuple([id: one.id, seed: one.seed], source, one.obs, split, one.aliases, one.genes, one.recipe)
            }
    )
    stores = PREPROCESS.out.store.map { meta, store -> tuple(meta.id, store) }
        .mix(channel.fromList(plan.stores.findAll { one -> one.ready }).map { one -> tuple(one.id, one.ready) })

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
    asked  = plan.units.collect { unit -> [unit.id, [unit.scored, unit.targets]] }
    GATHER_FOR_UNIT(asked, things)
    scales = GATHER_FOR_UNIT.out.gathered.map { unit, found -> tuple(unit, found[0], found[1]) }

    described = pairs.mix(stores.map { id, store -> tuple(id, store, []) })
    STATS(
        channel.fromList(plan.pairs + plan.bare)
            .map { one -> tuple(one.id, one) }
            .combine(described, by: 0)
            .map { _id, one, store, split -> tuple(one.listed, one, store, split) }
            .combine(things, by: 0)
            .map { _key, one, store, split, list -> tuple(one.subMap(['id', 'published']), store, split, list) }
    )

    statistics = STATS.out.tables.map { _meta, tables -> tables }
    bundles    = IMPORT.out.bundle.map { meta, bundle -> tuple(meta.id, bundle) }
    versions   = SIMULATE.out.versions
        .mix(FETCH.out.versions, CHECK.out.versions, EMBED.out.versions, IMPORT.out.versions)
        .mix(VOCABULARY.out.versions, VOCABULARY_OF_LISTS.out.versions)
        .mix(SPLIT_FIRST.out.versions, PREPROCESS.out.versions, SPLIT.out.versions, STATS.out.versions)

    emit:
    stores      // id, folder
    splits      // id, parquet
    pairs       // id, store folder, split parquet
    units       // id, store folder, split parquet: a pair for each part that is predicted
    scales      // id of a pair, the genes that are scored and the table of target genes, or [] for each
    things      // key, path: gene lists and semantic tables, as the plan names them
    bundles     // id, folder: of imported checkpoints
    statistics  // folder
    versions
}
