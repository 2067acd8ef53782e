package account

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

const maxTags = 50

// TagSpecification gives the tags of one kind of resource that a request makes.
type TagSpecification struct {
	ResourceType string `query:"ResourceType"`
	Tags         []Tag  `query:"Tag"`
}

// CreateTagsRequest is the input of CreateTags.
type CreateTagsRequest struct {
	DryRun    `query:",inline"`
	Resources []string `query:"ResourceId"`
	Tags      []Tag    `query:"Tag"`
}

// CreateTags adds tags to resources of any kind, or overwrites them; all
// resources get them or none.
func (a *Account) CreateTags(req CreateTagsRequest) *Error {
	return a.mutate(req.DryRun.DryRun, func(s *state, now time.Time) *Error {
		if len(req.Tags) == 0 {
			return missing("tagSet")
		}
		if err := checkTags(req.Tags); err != nil {
			return err
		}
		return s.retag(req.Resources, now, func(tags []Tag) ([]Tag, *Error) { return mergeTags(tags, req.Tags) })
	})
}

// TagKey selects a tag to delete: with a Value only if it has that value.
type TagKey struct {
	Key   string  `query:"Key"`
	Value *string `query:"Value"`
}

// DeleteTagsRequest is the input of DeleteTags. No tags means all of them.
type DeleteTagsRequest struct {
	DryRun    `query:",inline"`
	Resources []string `query:"ResourceId"`
	Tags      []TagKey `query:"Tag"`
}

// DeleteTags removes tags. Removing a tag that is not there is no error.
func (a *Account) DeleteTags(req DeleteTagsRequest) *Error {
	return a.mutate(req.DryRun.DryRun, func(s *state, now time.Time) *Error {
		return s.retag(req.Resources, now, func(tags []Tag) ([]Tag, *Error) {
			if len(req.Tags) == 0 {
				return nil, nil
			}
			return slices.DeleteFunc(slices.Clone(tags), func(tag Tag) bool {
				return slices.ContainsFunc(req.Tags, func(k TagKey) bool {
					return k.Key == tag.Key && (k.Value == nil || *k.Value == tag.Value)
				})
			}), nil
		})
	})
}

// retag replaces the tags of each resource by what change makes of them.
func (s *state) retag(resources []string, now time.Time, change func([]Tag) ([]Tag, *Error)) *Error {
	if len(resources) == 0 {
		return missing("resourceIdSet")
	}
	for _, id := range resources {
		if err := s.retagOne(id, now, change); err != nil {
			return err
		}
	}
	return nil
}

func (s *state) retagOne(id string, now time.Time, change func([]Tag) ([]Tag, *Error)) *Error {
	prefix, _, _ := strings.Cut(id, "-")
	switch prefix + "-" {
	case "eni-":
		return retagRow(s.enis, kindENI(), ENIID(id), func(n *NetworkInterface) *[]Tag { return &n.Tags }, change)
	case "i-":
		if _, err := s.instance(InstanceID(id), now); err != nil {
			return err
		}
		return retagRow(s.instances, kindInstance(), InstanceID(id), func(n *Instance) *[]Tag { return &n.Tags }, change)
	case "subnet-":
		return retagRow(s.subnets, kindSubnet(), SubnetID(id), func(n *Subnet) *[]Tag { return &n.Tags }, change)
	case "vpc-":
		return retagRow(s.vpcs, kindVPC(), VPCID(id), func(n *VPC) *[]Tag { return &n.Tags }, change)
	case "sg-":
		return retagRow(s.groups, kindGroup(), GroupID(id), func(n *SecurityGroup) *[]Tag { return &n.Tags }, change)
	case "rtb-":
		return retagRow(s.routeTables, kindRouteTable(), RouteTableID(id), func(n *RouteTable) *[]Tag { return &n.Tags }, change)
	}
	return Errorf("InvalidID", "The ID '%s' is not valid", id)
}

func retagRow[K ~string, V any](t *table[K, V], k kind, id K, tags func(*V) *[]Tag, change func([]Tag) ([]Tag, *Error)) *Error {
	row, err := find(t, k, id)
	if err != nil {
		return err
	}
	changed, err := change(*tags(&row))
	if err != nil {
		return err
	}
	*tags(&row) = changed
	t.put(id, row)
	return nil
}

func checkTags(tags []Tag) *Error {
	seen := make(map[string]bool)
	for _, tag := range tags {
		switch {
		case tag.Key == "":
			return invalid("Tag key cannot be empty")
		case strings.HasPrefix(strings.ToLower(tag.Key), "aws:"):
			return invalid("Tag keys starting with 'aws:' are reserved for internal use")
		case utf8.RuneCountInString(tag.Key) > 127:
			return invalid("Tag key exceeds the maximum length of 127 characters")
		case utf8.RuneCountInString(tag.Value) > 255:
			return invalid("Tag value exceeds the maximum length of 255 characters")
		case seen[tag.Key]:
			return invalid("Duplicate tag key '%s' specified.", tag.Key)
		}
		seen[tag.Key] = true
	}
	return nil
}

// mergeTags lays new tags over old ones and sorts them by key.
func mergeTags(old, add []Tag) ([]Tag, *Error) {
	values := make(map[string]string, len(old)+len(add))
	for _, tag := range slices.Concat(old, add) {
		values[tag.Key] = tag.Value
	}
	if len(values) > maxTags {
		return nil, Errorf("TagLimitExceeded", "The maximum number of Tags for a resource has been reached.")
	}
	return tagsFromMap(values), nil
}

func tagsFromMap(values map[string]string) []Tag {
	var tags []Tag
	for _, key := range slices.Sorted(maps.Keys(values)) {
		tags = append(tags, Tag{Key: key, Value: values[key]})
	}
	return tags
}

// specifiedTags checks tag specifications and returns the tags by resource
// type. Types other than those allowed are refused.
func specifiedTags(specs []TagSpecification, allowed ...string) (map[string][]Tag, *Error) {
	byType := make(map[string][]Tag)
	for _, spec := range specs {
		if spec.ResourceType == "" {
			return nil, missing("resourceType")
		}
		if !slices.Contains(allowed, spec.ResourceType) {
			return nil, invalid("'%s' is not a valid taggable resource type for this operation.", spec.ResourceType)
		}
		all := slices.Concat(byType[spec.ResourceType], spec.Tags)
		if err := checkTags(all); err != nil {
			return nil, err
		}
		merged, err := mergeTags(nil, all)
		if err != nil {
			return nil, err
		}
		byType[spec.ResourceType] = merged
	}
	return byType, nil
}

// TaggedResource is one row of DescribeTags.
type TaggedResource struct {
	ID   string
	Type string
	Tag  Tag
}

// taggedResources lists every tag in the account, by resource id and key.
func (s *state) taggedResources(now time.Time) []TaggedResource {
	var all []TaggedResource
	add := func(id, typ string, tags []Tag) {
		for _, tag := range tags {
			all = append(all, TaggedResource{ID: id, Type: typ, Tag: tag})
		}
	}
	for _, row := range s.enis.all() {
		add(string(row.ID), "network-interface", row.Tags)
	}
	for _, row := range s.instances.all() {
		if row.visible(now) {
			add(string(row.ID), "instance", row.Tags)
		}
	}
	for _, row := range s.subnets.all() {
		add(string(row.ID), "subnet", row.Tags)
	}
	for _, row := range s.vpcs.all() {
		add(string(row.ID), "vpc", row.Tags)
	}
	for _, row := range s.groups.all() {
		add(string(row.ID), "security-group", row.Tags)
	}
	for _, row := range s.routeTables.all() {
		add(string(row.ID), "route-table", row.Tags)
	}
	slices.SortFunc(all, func(x, y TaggedResource) int {
		return cmp.Or(cmp.Compare(x.ID, y.ID), cmp.Compare(x.Tag.Key, y.Tag.Key))
	})
	return all
}
