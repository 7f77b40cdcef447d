include { quoted } from '../plan/characters'

// A published data set, into a folder that stays: an interrupted transfer goes on there. Planned only where files are
// missing, so that nothing of it is remembered.
process FETCH {
    tag   "${meta.id}"
    label 'process_low'
    label 'cpu'
    cache false

    input:
    // meta.folder: where its files go, which tasks then read
    val meta

    output:
    val meta,            emit: fetched
    path 'versions.yml', emit: versions

    script:
    """
    perturbdiff data get ${meta.id} --out ${quoted(meta.folder)} --yes
    echo "${task.process.tokenize(':').last()}: \$(perturbdiff --version)" > versions.yml
    """

    stub:
    """
    touch versions.yml
    """
}
