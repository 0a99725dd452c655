"""The faults, by the names that the campaign gives them."""

import cluster_faults as cluster
import training_faults as training
from attempts import Family

FAMILIES = {
    "kill": Family(training.choose_kill, training.attempt_kill),
    "save": Family(training.choose_save, training.attempt_save),
    "disk": Family(training.choose_disk, training.attempt_disk),
    "signal": Family(training.choose_signal, training.attempt_signal),
    "requeue": Family(cluster.choose_requeue, cluster.attempt_requeue),
    "still": Family(training.choose_still, training.attempt_still),
    "endless": Family(training.choose_endless, training.attempt_endless),
    "node": Family(cluster.choose_node, cluster.attempt_node),
    "cancel": Family(cluster.choose_cancel, cluster.attempt_cancel),
}
