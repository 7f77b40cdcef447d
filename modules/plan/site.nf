// Profiles, image and folders that do not go together, told before anything is submitted.

def profileProblems(names, given) {
    def problems = []
    def against  = { name, others ->
        others.findAll { other -> name in names && other in names }
            .each { other -> problems << "-profile ${name} and ${other} exclude each other" }
    }
    if ('multinode' in names && !('slurm' in names)) {
        problems << '-profile multinode needs slurm: -profile slurm,multinode'
    }
    against.call('slurm', ['standard', 'gpu'])
    if ('apptainer' in names && !given.container) {
        problems << 'profile apptainer needs an image: --container FILE.sif (bin/build-image makes one)'
    }
    if (given.container && !names.any { name -> name in ['apptainer', 'slurm', 'site'] }) {
        problems << '--container is used with -profile slurm or apptainer ' +
            '(on this machine: -profile standard,apptainer)'
    }
    if ('multinode' in names && given.num_nodes < 2) {
        problems << '-profile multinode is for several nodes: give --num_nodes'
    }
    if (given.num_nodes > 1 && !('multinode' in names)) {
        problems << "--num_nodes ${given.num_nodes} needs -profile slurm,multinode"
    }
    if (given.baseline_images && !given.container) {
        problems << '--baseline_images goes with --container; ' +
            'without, external methods are installed by perturbdiff baseline install'
    }
    if (given.site_config && !('site' in names)) { problems << '--site_config is read with -profile …,site' }
    if ('site' in names && !given.site_config) { problems << '-profile site needs --site_config FILE' }
    if (given.job_arrays && !names.any { name -> name in ['slurm', 'site'] }) {
        problems << '--job_arrays needs -profile slurm'
    }
    return problems
}

// the first bytes of an Apptainer image; a folder is one that was unpacked
def isImage(path) {
    if (path.directory) { return new java.io.File(path, '.singularity.d').exists() }
    return path.withInputStream { stream -> new String(stream.readNBytes(64), 'ISO-8859-1').contains('SIF_MAGIC') }
}

def onPath(program) {
    return "${System.getenv('PATH')}".split(':')
        .any { folder -> new java.io.File("${folder}", "${program}").canExecute() }
}

def imageProblems(names, container) {
    if (!container || container.contains('://')) { return [] }
    def path = new java.io.File("${container}").absoluteFile
    if (!path.exists()) {
        def hint = container.contains('/') ? '' : ' (an image in a registry is written docker://NAME)'
        return ["--container: there is no ${path}${hint}"]
    }
    if (!isImage(path)) { return ["--container: ${path} is no Apptainer image (bin/build-image makes one)"] }
    return 'apptainer' in names && !('slurm' in names) && !onPath('apptainer') ?
        ['profile apptainer: there is no apptainer on this machine'] : []
}

// what the container is to see is given as one text with commas between the folders
def folderProblems(given) {
    def folders = [ckpt_dir: given.ckpt_dir, outdir: given.outdir]
    return folders.findAll { _name, folder -> "${folder}" =~ /[,:'"\\]/ }.collect { name, folder ->
        "--${name}: '${folder}' has one of , : ' \" \\ in its name, which a container cannot be told"
    }
}

def nodeLocal(folder) {
    def path = new java.io.File("${folder}").absolutePath
    return ['/tmp', '/var/tmp', '/dev/shm', '/run'].any { local -> path == local || path.startsWith("${local}/") }
}

def siteWarnings(names, given, work) {
    if (!('slurm' in names)) { return [] }
    def folders  = ['--ckpt_dir': given.ckpt_dir, '--outdir': given.outdir, '-work-dir': work]
    def local    = folders.findAll { _name, folder -> nodeLocal(folder) }
        .collect { name, folder -> "${name} ${new java.io.File("${folder}").absolutePath}" }
    def warnings = local ?
        ["${local.join(', ')}: often a node's own disk, but all nodes and this machine must see it"] : []
    if (given.container && !onPath('apptainer')) {
        warnings << 'there is no apptainer on this machine; the nodes need one'
    }
    warnings += (given.bind ?: '').split(',').collect { one -> one.trim().split(':')[0] }
        .findAll { one -> one && !new java.io.File("${one}").exists() }
        .collect { one -> "--bind: there is no ${one} here; a container does not start where it is missing" }
    def asked = "${given.gpu_options ?: ''}" =~ /gpu\S*?[:=](\d+)(?=\s|$)/
    if (asked && asked[0][1] as int != given.num_gpus) {
        warnings << "--gpu_options asks for ${asked[0][1]} GPUs and --num_gpus is ${given.num_gpus}: " +
            'training starts one process for each of --num_gpus'
    }
    return warnings
}

// given: params; names: of the profiles; work: the work folder
def checkSite(given, names, work) {
    def container = given.container ? "${given.container}".toString() : null
    def contained = 'slurm' in names || 'apptainer' in names
    def problems  = profileProblems(names, given) + imageProblems(names, container) +
        (contained ? folderProblems(given) : [])
    if (problems) {
        error("profiles and parameters do not go together (see docs/cluster.md):\n  " + problems.join('\n  '))
    }
    siteWarnings(names, given, work).each { warning -> log.warn "${warning}" }
    if ('slurm' in names && !container) {
        log.info 'perturbdiff: no --container, so tasks use the environment of this shell, which all nodes must see'
    }
}
