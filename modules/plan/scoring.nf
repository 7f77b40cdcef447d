// How each prediction and each ceiling is scored, and metrics are calibrated:
// its unit, its name in the tables and its recipe.
// Without includes, as several scripts include it: the strict parser takes no others twice.

// units with real cells that predictions are compared with
def judging(plan) {
    return plan.units.findAll { unit -> unit.judge == unit.id }
}

// scored by the rules of cell-eval2, which have two ends of a scale in place of calibration and ceiling
def byCounts(recipe) {
    return new groovy.json.JsonSlurper().parseText(recipe).evaluate?.definition == 'cell-eval2'
}

// these rules score counts, which baselines do not predict, and models only if they are told
def countProblems(plan) {
    def others = (plan.baselines + plan.externals).findAll { one -> byCounts(one.evaluate) }
    def models = plan.models.findAll { run -> !run.conditions && run.sample && byCounts(run.evaluate) }
        .findAll { run -> new groovy.json.JsonSlurper().parseText(run.sample).sample?.values != 'counts' }
    def wrong = others.collect { one -> one.method }.unique().collect { name ->
        "'${name}' predicts log1p values: leave it out (--baselines none), or take another definition"
    } + models.collect { run -> "'${run.id}' predicts log1p values: set sample.values=counts" }
    return wrong.collect { problem -> "evaluate.definition=cell-eval2 scores counts, but ${problem}".toString() }
}

// id of a prediction → what EVALUATE is told
def scoringOf(plan, seed) {
    def units  = plan.units.collectEntries { unit -> [(unit.id): unit] }
    def models = plan.models.findAll { run -> !run.conditions }.collect { run -> run + [method: run.id] }
    return (models + plan.baselines + plan.externals).collectEntries { one ->
        [(one.id): [id: "${one.id}.metrics".toString(), unit: one.unit.judge, method: one.method,
            dataset: units[one.unit.id].label, seed: seed, recipe: one.evaluate,
            byCounts: byCounts(one.evaluate),
            // a calibration is of one definition of the metrics, and so are the ends of a scale
            calibrated: one.evaluate == units[one.unit.judge].evaluate]]
    }
}

// what is made once of the real cells of each unit: kind, whether its units are scored by cell-eval2
def onceOf(plan, kind, counted, seed) {
    return judging(plan).findAll { unit -> byCounts(unit.evaluate) == counted }.collect { unit ->
        [id: "${unit.id}.${kind}".toString(), unit: unit.id, dataset: unit.label,
            seed: seed, part: unit.part, recipe: unit.evaluate]
    }
}

// what the report is told beside files; scored: number of the tables that there are
def reportOf(plan, scored, stamp) {
    def wanted = plan.expected.size() - 1 + plan.ceilings.size()
    def said   = [title: plan.chosen.title, against: plan.chosen.against, figures: plan.figures.join(',')]
    // what is missing is in the report with its reason, which may be another one each time: so it is made again
    return [id: 'report', expected: plan.expected, design: plan.compares ? plan.design : [],
        options: said.findAll { _name, value -> value }, missing: scored < wanted ? stamp : '']
}
