{{- define "trainingjob-operator.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Name of the namespaced objects; short enough for the longest suffix, -leader-election. */}}
{{- define "trainingjob-operator.fullname" -}}
{{- $name := include "trainingjob-operator.name" . }}
{{- if .Values.fullnameOverride }}
{{- $name = .Values.fullnameOverride }}
{{- else if not (contains $name .Release.Name) }}
{{- $name = printf "%s-%s" .Release.Name $name }}
{{- else }}
{{- $name = .Release.Name }}
{{- end }}
{{- $name | trunc 47 | trimSuffix "-" }}
{{- end }}

{{/* Name of the cluster-wide objects: releases of one name in two namespaces are two. */}}
{{- define "trainingjob-operator.clusterName" -}}
{{- printf "%s:%s" .Release.Namespace (include "trainingjob-operator.fullname" .) }}
{{- end }}

{{- define "trainingjob-operator.selectorLabels" -}}
app.kubernetes.io/name: {{ include "trainingjob-operator.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "trainingjob-operator.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "trainingjob-operator.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: trainingjob-operator
{{- end }}

{{- define "trainingjob-operator.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "trainingjob-operator.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "trainingjob-operator.keySecretName" -}}
{{- default (printf "%s-key" (include "trainingjob-operator.fullname" .)) .Values.auth.existingSecret }}
{{- end }}

{{- define "trainingjob-operator.image" -}}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}
{{- end }}

{{/* The operator's configuration file. */}}
{{- define "trainingjob-operator.config" -}}
nodePools: {{- .Values.nodePools | toYaml | nindent 2 }}
namespaces: {{- .Values.namespaces | toYaml | nindent 2 }}
watchNodes: {{ .Values.watchNodes }}
workers: {{ .Values.workers }}
port: 8080
tokenKeyFile: /etc/trainingjob-operator/key
leaderElection:
  enabled: true
  namespace: {{ .Release.Namespace }}
  name: {{ include "trainingjob-operator.fullname" . }}
logLevel: {{ .Values.logLevel }}
{{- end }}

{{/*
The operator's rights where jobs are: exactly what its code asks of the API server.

trainingjobs           list, watch: events and resync; get: each reconcile; patch: our finalizer;
                       delete: ttlSecondsAfterFinished
trainingjobs/status    update: the status is replaced as a whole
trainingjobs/finalizers update: owner references of a job's children block its deletion
rayclusters            list, watch: events; get: each reconcile; create, patch: server-side apply;
                       delete: the end of a cluster
pods                   list, watch: readiness and what keeps pods from it; delete: pods on lost
                       nodes. Pods are created by KubeRay, never by the operator
events                 list: why a pod does not start; create, get, patch: events about jobs
secrets                create: a job's token; delete: its end. Nothing that shows a Secret: the
                       answer to a patch would
configmaps             create, patch: server-side apply of a job's config; delete: its end
*/}}
{{- define "trainingjob-operator.rules" -}}
- apiGroups: [raytraining.dev]
  resources: [trainingjobs]
  verbs: [get, list, watch, patch, delete]
- apiGroups: [raytraining.dev]
  resources: [trainingjobs/status, trainingjobs/finalizers]
  verbs: [update]
- apiGroups: [ray.io]
  resources: [rayclusters]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [get, list, create, patch]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create, delete]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [create, patch, delete]
{{- end }}
