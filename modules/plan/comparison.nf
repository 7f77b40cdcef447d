// What each scored run is in its experiment: lines of design.csv, by which the report draws an experiment's figures.

// columns of a sheet that speak of the comparison
def comparisonColumns() {
    return ['part', 'arm', 'level', 'collection']
}

def comparisonProblems(row) {
    if (row.mode != 'pretrain') { return [] }
    return comparisonColumns().findAll { name -> row[name] }
        .collect { name -> "'${name}' is for rows that are scored, which a pretrain row is not" }
}

def compares(rows) {
    return rows.any { row -> row.mode == 'sample' || comparisonColumns().any { name -> row[name] } }
}

// data sets that belong together: as a row says, else as `usual` calls the unit, name of a unit → name
def collectionOf(unit, runs, usual) {
    def said = runs.findAll { run -> run.unit && run.unit.judge == unit.id && run.collection }
        .collect { run -> run.collection }.unique()
    if (said.size() > 1) {
        error("samplesheet: ${usual} is in several collections: ${said.join(', ')}; " +
            "all rows of a data set, split and part belong to one")
    }
    return said ? said[0] : usual
}

// labels: unit → dataset in the tables; collections: unit → collection
def designOf(models, baselines, labels, collections) {
    def line = { one, method, arm ->
        [labels[one.unit.id], method, one.unit.part, collections[one.unit.id], arm, one.level, one.seed, one.init]
            .collect { value -> value == null ? '' : value }.join(',')
    }
    return ['dataset,method,part,collection,arm,level,seed,init'] +
        models.collect { run -> line.call(run, run.id, run.arm) } +
            baselines.collect { one -> line.call(one, one.method, one.arm ?: one.name) }
}
