#!/usr/bin/env nextflow

// perturbdiff: raw counts → store → split → model or baseline → predictions → metrics → one report.
// A sheet lists runs; stores and splits that runs have in common are made once. docs/workflow.md

include { readParameters    } from './modules/plan/parameters'
include { checkSite         } from './modules/plan/site'
include { prepare; readPlan } from './modules/plan/plan'
include { byName            } from './modules/plan/parts'
include { reportOf          } from './modules/plan/scoring'
include { summarise         } from './modules/plan/summary'

include { DATA    } from './subworkflows/local/data'
include { FIT     } from './subworkflows/local/fit'
include { PREDICT } from './subworkflows/local/predict'
include { SCORE   } from './subworkflows/local/score'
include { REPORT  } from './modules/local/report'

workflow {
    // everything that can be known to be wrong is told before the first task
    given = readParameters(params, file("${projectDir}/nextflow_schema.json"), workflow)
    checkSite(given, workflow.profile.split(',') as List, workflow.workDir)
    plan = readPlan(given, workflow)
    prepare(plan, given, workflow)

    DATA(plan)                                                     // raw counts → stores and splits, lists, vectors
    FIT(plan, DATA.out.stores, DATA.out.pairs, DATA.out.things, DATA.out.scales, DATA.out.bundles)
    bundles = FIT.out.bundles.map { meta, bundle -> tuple(meta.id, bundle) }.mix(DATA.out.bundles)
    PREDICT(plan, DATA.out.stores, DATA.out.units, DATA.out.things, bundles)               // → predictions
    SCORE(plan, DATA.out.units, DATA.out.scales, PREDICT.out.predictions)                  // → metrics

    // no metrics, no report
    REPORT(
        SCORE.out.metrics.toList().filter { found -> found }
            .map { found -> tuple(reportOf(plan, found.size(), params.report_stamp), byName(found), plan.published) },
        FIT.out.bundles.map { _meta, bundle -> bundle }.toList().map { found -> byName(found) },
        DATA.out.statistics.toList().map { found -> byName(found) },
        DATA.out.splits.map { _id, split -> split }.toList().map { found -> byName(found) },
        PREDICT.out.records.toList().map { found -> byName(found) },
    )

    DATA.out.versions.mix(FIT.out.versions, PREDICT.out.versions, SCORE.out.versions, REPORT.out.versions)
        .map { found -> found.text }
        .unique()
        .collectFile(name: 'versions.yml', storeDir: "${params.outdir}/pipeline_info", sort: true)

    workflow.onComplete { summarise() }
}
