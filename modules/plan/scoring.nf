// How each prediction and each ceiling is scored, and metrics are calibrated:
// its unit, its name in the tables and its recipe.
// Without includes, as several scripts include it: the strict parser takes no others twice.

// units with real cells that predictions are compared with
def judging(plan) {
    return plan.units.findAll { unit -> unit.judge == unit.id }
}

// id of a prediction → what EVALUATE is told
def scoringOf(plan, seed) {
    def units  = plan.units.collectEntries { unit -> [(unit.id): unit] }
    def models = plan.models.findAll { run -> !run.conditions }.collect { run -> run + [method: run.id] }
    return (models + plan.baselines + plan.externals).collectEntries { one ->
        [(one.id): [id: "${one.id}.metrics".toString(), unit: one.unit.judge, method: one.method,
            dataset: units[one.unit.id].label, seed: seed, recipe: one.evaluate,
            // a calibration is of one definition of the metrics
            calibrated: one.evaluate == units[one.unit.judge].evaluate]]
    }
}

def ceilingsOf(plan, seed) {
    return judging(plan).collect { unit ->
        [id: "${unit.id}.ceiling.metrics".toString(), unit: unit.id, dataset: unit.label,
            seed: seed, part: unit.part, recipe: unit.evaluate]
    }
}

def calibrationsOf(plan, seed) {
    return judging(plan).collect { unit ->
        [id: "${unit.id}.calibration".toString(), unit: unit.id, dataset: unit.label,
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
