// Profiles, image and folders that do not go together, told before anything is submitted.

// programs that run containers, each a profile; Slurm's profile has the first
def engines() {
    return ['apptainer', 'singularity', 'docker', 'podman']
}

// the one that tasks run in, or null
def engineOf(names) {
    def usual = 'slurm' in names ? 'apptainer' : null
    return engines().find { name -> name in names } ?: usual
}

// these take the name of an image, not its file
def takesName(engine) {
    return engine in ['docker', 'podman']
}

def engineProblems(names, given) {
    def asked    = engines().findAll { name -> name in names }
    def problems = asked.size() > 1 ? ["-profile ${asked.join(' and ')} exclude each other"] : []
    if (asked && !given.container) {
        def how = takesName(asked[0]) ? "--container NAME (${asked[0]} build -f containers/Dockerfile makes one)" :
            '--container FILE.sif (bin/build-image makes one)'
        problems << "profile ${asked[0]} needs an image: ${how}"
    }
    if (asked && 'slurm' in names && names.indexOf(asked[0]) < names.indexOf('slurm')) {
        problems << "the later profile decides: write -profile slurm,${asked[0]}"
    }
    if ('conda' in names && given.container) { problems << '-profile conda and --container exclude each other' }
    if ('multinode' in names && asked.any { name -> name != 'apptainer' }) {
        problems << "-profile multinode starts apptainer itself: leave ${asked.join(', ')} out"
    }
    if (given.container && !asked && !given.custom_config_base && !names.any { name -> name in ['slurm', 'site'] }) {
        problems << "--container is used with -profile slurm or ${engines().join(', ')} " +
            '(on this machine: -profile standard,apptainer)'
    }
    if (given.conda_env && !('conda' in names)) { problems << '--conda_env is read with -profile conda' }
    return problems
}

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
    if (given.container && "${given.dask_scheduler ?: ''}".startsWith('slurm:')) {
        problems << "--dask_scheduler ${given.dask_scheduler}: an image has no sbatch; " +
            'start the workers yourself and give the address of their scheduler (docs/scale.md)'
    }
    problems += engineProblems(names, given)
    if (given.site_config && !('site' in names)) { problems << '--site_config is read with -profile …,site' }
    if ('site' in names && !given.site_config) { problems << '-profile site needs --site_config FILE' }
    if (given.job_arrays && !given.custom_config_base && !names.any { name -> name in ['slurm', 'site'] }) {
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
    def engine = engineOf(names)
    if (container && takesName(engine)) {
        return 'slurm' in names || onPath(engine) ? [] : ["profile ${engine}: there is no ${engine} on this machine"]
    }
    if (!container || container.contains('://')) { return [] }
    if (container.contains(':')) { return ["--container: '${container}' names an image: write docker://${container}"] }
    def path = new java.io.File("${container}").absoluteFile
    if (!path.exists()) {
        def hint = container.contains('/') ? '' : ' (an image in a registry is written docker://NAME)'
        return ["--container: there is no ${path}${hint}"]
    }
    if (!isImage(path)) { return ["--container: ${path} is no Apptainer image (bin/build-image makes one)"] }
    return engine in names && !('slurm' in names) && !onPath(engine) ?
        ["profile ${engine}: there is no ${engine} on this machine"] : []
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
    def contained = engineOf(names) != null
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
