// Mistakes in rows that make what other rows use.

include { filesIn; optionsOf } from './inputs'

// columns that such rows have beside id, mode, input and dataset
def columnsOf(mode) {
    return [
        vocabulary: ['preset', 'overrides', 'add', 'options'],
        embed: ['options'],
        import: ['genes', 'embeddings', 'options'],
    ][mode]
}

def makerProblems(row, rows) {
    def known = ['id', 'mode', 'input', 'dataset'] + columnsOf(row.mode)
    def problems = row.findAll { name, value -> value && !(name in known) }
        .collect { name, _value -> "'${name}' is not for rows of mode ${row.mode}" }
    if (row.mode == 'embed' && !optionsOf(row).model) { problems << "'options' names no model: model=esm2-650m" }
    if (row.mode == 'vocabulary') {
        def late = filesIn(row.add).findAll { name -> rows.any { other -> other.id == name && other.add } }
        problems += late.collect { name -> "add '${name}': that row adds to its list itself; name what it adds" }
    }
    return problems
}
